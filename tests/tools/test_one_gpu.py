"""Several ranks on one GPU: what becomes of their answers; here invented, for the ranks need a GPU."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from murmura import PeerLost
from murmura.tools.one_gpu import OneGPU


@pytest.fixture
def world_that_answers(request: pytest.FixtureRequest) -> Callable[..., OneGPU]:
    """Makes a world whose ranks have answered a call already."""

    def make(*answers: bytes) -> OneGPU:
        gpu = OneGPU(len(answers), mps=False)
        request.addfinalizer(gpu.close)
        for answer in answers:
            ours, theirs = multiprocessing.Pipe()
            request.addfinalizer(theirs.close)
            theirs.send_bytes(answer)
            gpu._pipes.append(ours)
            gpu._processes.append(SimpleNamespace(join=lambda timeout: None, exitcode=0, close=lambda: None))
        return gpu

    return make


def answer(result: Any = None, error: BaseException | None = None) -> bytes:
    return pickle.dumps((result, error, "its trace"))


def test_the_first_error_that_is_no_echo_is_raised(world_that_answers: Callable[..., OneGPU]) -> None:
    gpu = world_that_answers(answer(7), answer(error=PeerLost("rank 2 is gone")), answer(error=ValueError("its own")))
    with pytest.raises(ValueError, match="its own") as raised:
        gpu.run(print)
    assert raised.value.__notes__ == ["On rank 2:\nits trace"]
    with pytest.raises(PeerLost, match="is gone"):
        world_that_answers(answer(error=PeerLost("rank 1 is gone"))).run(print)


def test_an_answer_that_cannot_be_read_ends_the_world(world_that_answers: Callable[..., OneGPU]) -> None:
    """The next call would take what the others have answered for its own."""
    gpu = world_that_answers(b"no pickle", answer("of this call"))
    with pytest.raises(pickle.UnpicklingError):
        gpu.run(print)
    assert gpu._pipes == gpu._processes == []
