"""A step that one rank skips holds nobody up at the next collective of torch.distributed: DDP hears of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from c10d.groups import run
from ddp.models import backward, weight
from murmura import DDP


def skip_on_one_rank(given: bool) -> None:
    ddp = DDP(weight(), algorithm="local_sgd:interval=1", process_group=dist.group.WORLD if given else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    total = torch.ones(1)
    for skipping in (0, 1, 1):  # the second time an all-reduce of this size is repeated
        backward(ddp, dist.get_rank())
        if dist.get_rank() != skipping:
            optimizer.step()
        dist.all_reduce(total)
    dist.barrier()
    assert total.item() == 8.0
    ddp.settle()
    ddp.verify_in_sync()
    ddp.close()
    dist.all_reduce(total)


@pytest.mark.parametrize("given", [False, True])
def test_what_a_skipped_step_left_undone_is_done_before_a_collective(given: bool) -> None:
    run(skip_on_one_rank, 2, given)
