"""torch's own tests of DistributedDataParallel, with `murmura.DDP` patched in for its class and nothing else.

The tables are printed at the end of the run: `make test-all`, or `pytest -m slow tests/torch_ddp`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_ddp.outcomes import NOT_PASSING, PASSING

pytest.importorskip("expecttest", reason="torch's own tests need it")

Recorder = Callable[[str, str], None]  # what pytest's `record_property` is

HERE = Path(__file__).parent
SAMPLE = (
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_undefined_grad_parity_unused_parameters",
)
SECONDS = 1500  # for all of them


def outcomes(wrapper: str, num_ranks: int, below: str, tests: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """How each test ended, by name. They run in a process of their own, whose torch is patched."""
    command = [sys.executable, "-m", "torch_ddp.suite", "--wrapper", wrapper, "--ranks", str(num_ranks), *tests]
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "MURMURA_TRANSPORT": below, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=SECONDS)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(tests), run.stderr[-3000:]
    return {line.pop("test"): line for line in lines}


def table(found: dict[str, dict[str, str]], title: str) -> str:
    passed = [name for name in found if found[name]["outcome"] == "passed"]
    rows = [f"  {found[name]['outcome']:8}{name}  {NOT_PASSING.get(name, '')}" for name in sorted(found)]
    return "\n".join([f"{title}: {len(passed)} of {len(found)} pass", *rows])


@pytest.mark.timeout(120)
def test_a_sample_passes() -> None:
    found = outcomes("murmura", 2, "shared_memory", SAMPLE)
    assert {name: each["outcome"] for name, each in found.items()} == dict.fromkeys(SAMPLE, "passed"), found


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_the_measure_is_what_passes_with_torchs_own_class(record_property: Recorder) -> None:
    found = outcomes("torch", 2, "gloo", (*PASSING, *NOT_PASSING))
    record_property("table", table(found, "torch's class, 2 ranks"))
    assert {name for name in found if found[name]["outcome"] != "passed"} == set()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(("num_ranks", "below"), [(2, "gloo"), (2, "shared_memory"), (3, "gloo")])
def test_those_listed_pass_and_the_others_do_not(num_ranks: int, below: str, record_property: Recorder) -> None:
    found = outcomes("murmura", num_ranks, below, (*PASSING, *NOT_PASSING))
    record_property("table", table(found, f"murmura.DDP, {num_ranks} ranks, {below}"))
    passed = {name for name in found if found[name]["outcome"] == "passed"}
    odd = {name for name in found if found[name]["reason"] == "Skipped due to odd world size."}
    assert passed | odd == set(PASSING), found
    assert bool(odd) == (num_ranks == 3)
