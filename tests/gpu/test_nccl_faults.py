"""NCCL ranks that are killed, stopped, stuck, raise or get out of step: the others say so in time, and go no further.

Each fault has a world of its own. Killed ranks have no MPS: it breaks the GPU contexts of all others with theirs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import pytest
import torch
from torch import nn

import murmura
from murmura import CollectiveMismatch, PeerLost, PeerTimeout, TracedTransport, Transport, TransportError
from murmura.tools.one_gpu import OneGPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]

DEADLINE = 4.0


def train_until(transport: Transport, fault: str, traced: bool) -> dict[str, Any]:
    """Rank 1 meets with `fault`; the others train on, and tell what they saw."""
    transport = TracedTransport(transport) if traced else transport
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    ddp = murmura.DDP(model, transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(16, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    transport.barrier()
    channel = ddp._replica.transport
    (channel.inner if isinstance(channel, TracedTransport) else channel).timeout = DEADLINE  # to start may take longer
    if transport.rank == 1:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            raise ZeroDivisionError("rank 1 divides by zero")
        if fault == "stuck":
            time.sleep(3 * DEADLINE)
            return {}
        if fault == "stopped":
            with subprocess.Popen(["sh", "-c", f"sleep {3 * DEADLINE}; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)
            return {}
        if fault == "ahead":
            ddp._replica.round += 1
    began, found = time.monotonic(), {}
    try:
        while time.monotonic() - began < 3 * DEADLINE:
            step()
            torch.cuda.synchronize()
            time.sleep(0.02)
    except (TransportError, CollectiveMismatch) as error:
        found |= {"error": error, "after": time.monotonic() - began, "notes": getattr(error, "__notes__", [])}
    for name, act in (("step", optimizer.step), ("save", ddp.algorithm_state_dict), ("forward", lambda: ddp(x))):
        try:
            act()
            found[name] = "it was not refused"
        except murmura.MurmuraError as error:
            found[name] = error
    closing = time.monotonic()
    ddp.close()
    found["closing"] = time.monotonic() - closing
    return found


def outcomes(num_ranks: int, fault: str, mps: bool, traced: bool = False) -> list[Any]:
    with OneGPU(num_ranks, mps=mps) as gpu:
        found = gpu.outcomes(train_until, fault, traced, limit=90)
    others = [each for rank, each in enumerate(found) if rank != 1]
    for each in others:
        if isinstance(each, BaseException):
            raise each
    return others


def check(found: dict[str, Any], kind: type[Exception], within: float) -> None:
    error = found["error"]
    words = " ".join([str(error), *found["notes"]])
    assert isinstance(error, kind), words
    assert found["after"] < within, words
    assert error.peer == 1, words
    assert "of round" in words, words
    assert "first parameter" in words, words
    assert "all_reduce #" in words, words
    for act in ("step", "save", "forward"):
        assert isinstance(found[act], murmura.MurmuraError), (act, found[act])
    assert found["closing"] < 5.0


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_stuck(num_ranks: int, traced: bool) -> None:
    for found in outcomes(num_ranks, "stuck", mps=True, traced=traced):
        check(found, PeerTimeout, DEADLINE + 4.0)
        assert "undefined" in str(found["error"])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_stopped(num_ranks: int) -> None:
    for found in outcomes(num_ranks, "stopped", mps=True):
        check(found, PeerTimeout, DEADLINE + 4.0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_raises(num_ranks: int) -> None:
    for found in outcomes(num_ranks, "raises", mps=True):
        check(found, PeerLost, 3.0)
        assert "ZeroDivisionError" in str(found["error"])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_killed(num_ranks: int) -> None:
    for found in outcomes(num_ranks, "killed", mps=False):
        check(found, PeerLost, 3.0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_a_round_ahead(num_ranks: int) -> None:
    for found in outcomes(num_ranks, "ahead", mps=True):
        assert isinstance(found["error"], CollectiveMismatch), found
