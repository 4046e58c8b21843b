"""A rank that was out of step in the last round is found in the next, before the state is saved, or the model closed.

On a GPU nobody looks when the round ends; here the round is marked as one that nobody has looked at.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ddp.models import on_ranks, weight
from murmura import DDP, CollectiveMismatch, Transport

ACTS: dict[str, Callable[[DDP], object]] = {
    "trained on": lambda ddp: ddp(torch.ones(1, 1)).sum().backward(),
    "saved": lambda ddp: ddp.algorithm_state_dict(),
    "closed": lambda ddp: ddp.close(),
    "planned anew": lambda ddp: ddp._driver.reducer.replan(),
}


def act_after_a_round(transport: Transport, act: str, is_out_of_step: bool) -> str:
    ddp = DDP(weight(1.0), transport)
    ddp(torch.ones(1, 1)).sum().backward()
    tail = ddp._driver.reducer._tail
    assert tail is not None
    tail._unread = 0
    tail.values[-1] += is_out_of_step
    try:
        ACTS[act](ddp)
    except CollectiveMismatch as error:
        return str(error)
    assert tail._unread is None
    return ""


@pytest.mark.parametrize("act", ACTS)
def test_it_is_found(act: str) -> None:
    assert all("in round 0" in told for told in on_ranks(act_after_a_round, 2, act, True))
    assert on_ranks(act_after_a_round, 2, act, False) == ["", ""]
