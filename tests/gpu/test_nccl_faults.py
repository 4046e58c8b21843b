"""NCCL ranks that are killed, stopped, stuck, raise or get out of step: the others say so in time, and go no further.

Each fault has a world of its own. Killed ranks have no MPS: it breaks the GPU contexts of all others with theirs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


@dataclass(frozen=True)
class Scenario:
    """What happens to rank `culprit`, and what all train."""

    fault: str
    culprit: int = 1
    algorithm: str = "gradient_allreduce"
    traced: bool = False


def limit(channel: Any) -> None:
    """Give what is launched from now on its deadline; to start may take longer."""
    channel.timeout = DEADLINE
    for each in (*channel._splits, *([channel.inner] if isinstance(channel, TracedTransport) else [])):
        limit(each)


def train_until(transport: Transport, scenario: Scenario) -> dict[str, Any]:
    """The culprit meets with its fault; the others train on, and tell what they saw."""
    transport = TracedTransport(transport) if scenario.traced else transport
    fault, culprit = scenario.fault, scenario.culprit
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    ddp = murmura.DDP(model, transport, algorithm=scenario.algorithm)
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
    limit(ddp._replica.transport)
    if transport.rank == culprit:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raises":
            raise ZeroDivisionError(f"rank {culprit} divides by zero")
        if fault in ("stuck", "saved at once"):
            time.sleep(3 * DEADLINE)
            return {}
        if fault == "stopped":
            with subprocess.Popen(["sh", "-c", f"sleep {3 * DEADLINE}; kill -CONT {os.getpid()}"]):
                os.kill(os.getpid(), signal.SIGSTOP)
            return {}
        if fault == "ahead":
            ddp._replica.round += 1
    began, found, num_steps = time.monotonic(), {}, 0
    try:
        while time.monotonic() - began < 3 * DEADLINE:
            step()
            num_steps += 1
            if fault == "saved at once":
                model.state_dict()
            torch.cuda.synchronize()
            time.sleep(0.02)
    except (TransportError, CollectiveMismatch) as error:
        found |= {"error": error, "after": time.monotonic() - began, "notes": getattr(error, "__notes__", [])}
        found["num_steps"] = num_steps
    acts = {
        "step": optimizer.step,
        "save": ddp.algorithm_state_dict,
        "read": model.state_dict,
        "forward": lambda: ddp(x),
    }
    for name, act in acts.items():
        try:
            act()
            found[name] = "it was not refused"
        except murmura.MurmuraError as error:
            found[name] = error
    closing = time.monotonic()
    ddp.close()
    found["closing"] = time.monotonic() - closing
    return found


def outcomes(num_ranks: int, scenario: Scenario, *, mps: bool = True) -> list[Any]:
    """What the others tell."""
    with OneGPU(num_ranks, mps=mps) as gpu:
        found = gpu.outcomes(train_until, scenario, limit=90)
    others = [each for rank, each in enumerate(found) if rank != scenario.culprit]
    for each in others:
        if isinstance(each, BaseException):
            raise each
    return others


def check(
    found: dict[str, Any], kind: type[Exception], within: float, culprit: int = 1, is_bucket: bool = True
) -> None:
    error = found["error"]
    words = " ".join([str(error), *found["notes"]])
    assert isinstance(error, kind), words
    assert found["after"] < within, words
    assert error.peer == culprit, words
    if is_bucket:
        assert "of round" in words, words
        assert "first parameter" in words, words
        assert "all_reduce #" in words, words
    for act in ("step", "save", "read", "forward"):
        assert isinstance(found[act], murmura.MurmuraError), (act, found[act])
    assert found["closing"] < 5.0


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_stuck(num_ranks: int, traced: bool) -> None:
    for found in outcomes(num_ranks, Scenario("stuck", traced=traced)):
        check(found, PeerTimeout, DEADLINE + 4.0)
        assert "undefined" in str(found["error"])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_stopped(num_ranks: int) -> None:
    for found in outcomes(num_ranks, Scenario("stopped")):
        check(found, PeerTimeout, DEADLINE + 4.0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_raises(num_ranks: int) -> None:
    for found in outcomes(num_ranks, Scenario("raises")):
        check(found, PeerLost, 3.0)
        assert "ZeroDivisionError" in str(found["error"])


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_killed(num_ranks: int) -> None:
    for found in outcomes(num_ranks, Scenario("killed"), mps=False):
        check(found, PeerLost, 3.0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_that_is_a_round_ahead(num_ranks: int) -> None:
    for found in outcomes(num_ranks, Scenario("ahead")):
        assert isinstance(found["error"], CollectiveMismatch), found
        assert found["num_steps"] <= 1  # of the round that met another one; the next tail is not written any more


def test_a_state_is_not_read_while_an_exchange_is_stuck() -> None:
    """It would be undefined, and nobody would know before the next round."""
    for found in outcomes(2, Scenario("saved at once")):
        check(found, PeerTimeout, DEADLINE + 4.0, is_bucket=False)
        assert found["num_steps"] == 1


def test_rank_0_that_is_stuck() -> None:
    for found in outcomes(3, Scenario("stuck", culprit=0)):
        check(found, PeerTimeout, DEADLINE + 4.0, culprit=0)


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized", "bytegrad"])
def test_a_rank_that_is_stuck_under(algorithm: str) -> None:
    for found in outcomes(3, Scenario("stuck", algorithm=algorithm)):
        check(found, PeerTimeout, DEADLINE + 4.0, is_bucket=False)


def outlive_a_failure(transport: Transport, folder: str) -> tuple[str, float]:
    """On a group of the user's rank 1 comes too late for a round: what rank 0 is told, and whether the group works."""
    store = dist.FileStore(os.path.join(folder, "the user's"), transport.world_size)
    dist.init_process_group("nccl", store=store, rank=transport.rank, world_size=transport.world_size)
    ddp = murmura.DDP(nn.Linear(64, 64).cuda())
    x, told = torch.ones(4, 64, device="cuda"), ""
    for _ in range(3):
        ddp(x).sum().backward()
    torch.cuda.synchronize()
    transport.barrier()
    ddp._replica.transport.timeout = DEADLINE
    if transport.rank == 1:
        time.sleep(2 * DEADLINE)
    else:
        try:
            while True:
                ddp(x).sum().backward()
                time.sleep(0.05)
        except PeerTimeout as error:
            told = str(error)
    ddp.close()
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    dist.destroy_process_group()
    return told, float(total[0])


def test_the_users_group_is_never_aborted() -> None:
    with OneGPU(2) as gpu:
        (told, total), (_, other) = gpu.run(outlive_a_failure, gpu.folder, limit=90)
    assert "rank 1" in told
    assert total == other == 2.0
