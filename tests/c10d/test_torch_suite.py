"""torch's own distributed tests: what passes on Gloo passes on murmura."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from c10d.torch_suite import ENDED

PROGRAM = Path(__file__).with_name("torch_suite.py")
SAMPLE = [
    "test_all_reduce_sum", "test_all_gather_coalesced_simple", "test_all_to_all_single_unequal_split",
    "test_DistributedDataParallelCPU", "test_get_future", "test_irecv", "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]  # fmt: skip

# These look at the name: they make a model for "gloo" and "nccl" only, or call what torch keeps for the name "gloo".
# They pass with our group in the place of Gloo's.
NAME_BOUND = {
    "test_accumulate_gradients_no_sync", "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook", "test_accumulate_gradients_no_sync_grad_is_view",
    "test_monitored_barrier_failure_order", "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
}  # fmt: skip

# These skip themselves in worlds of fewer than eight ranks.
FOR_EIGHT_RANKS = [
    "test_all_gather_coalesced_group", "test_all_gather_group", "test_all_reduce_coalesced_group_max",
    "test_all_reduce_coalesced_group_min", "test_all_reduce_coalesced_group_product",
    "test_all_reduce_coalesced_group_sum", "test_all_reduce_group_max", "test_all_reduce_group_min",
    "test_all_reduce_group_product", "test_all_reduce_group_sum", "test_all_to_all_group",
    "test_all_to_all_single_equal_split_group", "test_all_to_all_single_unequal_split_group", "test_barrier_group",
    "test_barrier_timeout_group", "test_broadcast_group", "test_gather_group", "test_monitored_barrier_failure_order",
    "test_monitored_barrier_wait_all_ranks", "test_reduce_group_max", "test_reduce_group_min",
    "test_reduce_group_product", "test_reduce_group_sum", "test_scatter_group",
]  # fmt: skip


def outcomes(folder: Path, *options: str) -> dict[str, list[str]]:
    results = folder / "results.json"
    subprocess.run([sys.executable, PROGRAM, "--json", results, *options], check=True, capture_output=True, timeout=900)
    return dict(json.loads(results.read_text()))


def passed(told: list[str]) -> bool:
    return all(each == "passed" for each in told)


def check(told: dict[str, list[str]]) -> None:
    faults = [f"{name}: {outcome}" for name, each in told.items() for outcome in each if outcome != "passed"]
    assert not faults, "\n".join(faults)


def test_a_sample_of_torchs_tests(tmp_path: Path) -> None:
    check(outcomes(tmp_path, *SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("ranks", "tests", "at_least"), [(2, [], 100), (4, [], 101), (8, FOR_EIGHT_RANKS, 23)])
def test_what_passes_on_gloo_passes_on_murmura(tmp_path: Path, ranks: int, tests: list[str], at_least: int) -> None:
    by_name = outcomes(tmp_path, "--backend=gloo", f"--ranks={ranks}", *tests)
    assert not [name for name, told in by_name.items() if ENDED in told], "the tests after it were not run"
    on_gloo = [name for name, told in by_name.items() if passed(told)]
    assert len(on_gloo) >= at_least, f"only {len(on_gloo)} of {len(by_name)} pass on Gloo"
    check(outcomes(tmp_path, f"--ranks={ranks}", *(name for name in on_gloo if name not in NAME_BOUND)))
    check(outcomes(tmp_path, "--stand-in", f"--ranks={ranks}", *(name for name in on_gloo if name in NAME_BOUND)))
