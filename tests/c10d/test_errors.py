"""The errors of process groups: murmura's own and torch's at once."""

from __future__ import annotations

import pickle

import pytest
import torch.distributed as dist

from murmura import CollectiveMismatch, PeerLost, PeerTimeout, TransportError
from murmura.errors import TransportClosed
from murmura.integrations.c10d.errors import as_torch_error

ERRORS = [
    *(
        kind("who and what", rank=1, peer=2, operation="all_reduce #3")
        for kind in (PeerLost, PeerTimeout, TransportError)
    ),
    TransportClosed("who and what"),
    CollectiveMismatch("who and what", {0: "all_reduce(sum) of float32[3]", 1: "barrier()"}),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_both_and_travels_between_processes(error: Exception) -> None:
    ours, text, state = type(error), str(error), vars(error).copy()
    both = as_torch_error(error)
    again = pickle.loads(pickle.dumps(both))
    for each in (both, again):
        assert isinstance(each, ours)
        assert isinstance(each, dist.DistBackendError)
        assert (type(each).__name__, str(each), vars(each)) == (ours.__name__, text, state)
