"""A wrapped model needs no more memory than under torch's wrapper with gradients that are views of its buckets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from ddp.models import values
from murmura import DDP, Transport, run_world
from murmura.tools.bench.ddp import BARE, MURMURA, step_method
from murmura.tools.bench.memory import measure_memory
from murmura.tools.bench.models import MODELS
from worlds import SECONDS


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", MODELS)
def test_no_more_memory_than_under_torchs_wrapper(model: str, tmp_path: Path) -> None:
    """Pss of a rank, beyond the bare module, in parts of the gradients; a second set of them would be one whole."""
    recipe = MODELS[model]
    used = {}
    for name in (MURMURA, "torch-ddp", BARE):
        folder = tmp_path / name
        folder.mkdir()
        used[name], *_ = run_world(
            measure_memory, 2, step_method, recipe, name, folder, kind="processes", timeout=SECONDS
        )
    ours, theirs = ((used[name] - used[BARE]) / recipe.num_bytes() for name in (MURMURA, "torch-ddp"))
    assert ours < theirs + 0.1


def segment_bytes() -> int:
    """What the shared segment holds, of all ranks together."""
    for entry in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{entry}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:murmura"):
            return os.stat(path).st_blocks * 512
    raise AssertionError("there is no segment")


def train_and_weigh(transport: Transport) -> tuple[int, int]:
    """What wrapping a model and training it adds to the segment, and what its gradients take."""
    transport.barrier()
    before = segment_bytes()
    transport.barrier()
    model = nn.Sequential(nn.Linear(500, 1000), nn.Linear(1000, 500))
    ddp = DDP(model, transport)
    for _ in range(3):  # the second has the buckets of a new plan
        ddp.zero_grad()
        ddp(values(2, 500, seed=transport.rank)).sum().backward()
    transport.barrier()
    added = segment_bytes() - before
    transport.barrier()
    ddp.close()
    return added, sum(parameter.nbytes for parameter in model.parameters())


def test_the_segment_holds_the_buckets_and_little_else() -> None:
    for added, num_bytes in run_world(train_and_weigh, 2, kind="processes", timeout=SECONDS):
        assert 2 * num_bytes <= added < 2 * num_bytes + 3 * 2**20  # the slots of a channel: 1 MiB for each rank
