"""The transport that docs/transports.md teaches to write keeps the contract, with public names alone."""

from __future__ import annotations

import ast
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from murmura import PeerLost, PeerTimeout, TransportClosed, TransportError, UsageError

PAGE = (Path(__file__).parent.parent / "docs" / "transports.md").read_text()
BLOCK = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[-1]
SECONDS = 20.0


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(BLOCK, "docs/transports.md", "exec"), names)
    return names


@pytest.fixture
def run(page: dict[str, Any]) -> Callable[..., list[Any]]:
    return lambda work, world_size: page["run_ranks"](work, world_size)


def test_it_uses_public_names_and_is_as_short_as_it_says() -> None:
    names = {node.attr for node in ast.walk(ast.parse(BLOCK)) if isinstance(node, ast.Attribute)}
    assert {name for name in names if name.startswith("_")} == {"__init__"}
    (body,) = [node for node in ast.parse(BLOCK).body if isinstance(node, ast.ClassDef)]
    code = [line for line in BLOCK.splitlines()[body.lineno - 1 : body.end_lineno] if line.strip()]
    assert len(code) <= 48  # 40 and the signatures


def test_collectives_channels_and_subgroups(run: Callable[..., list[Any]]) -> None:
    def work(transport: Any) -> tuple[list[int], float, list[float]]:
        gathered = [int(each) for each in transport.all_gather(torch.tensor([transport.rank]))]
        twice = [transport.channel("same").all_reduce(torch.ones(1)).item() for _ in range(2)]
        group = transport.subgroup([2, 0])
        total = 0.0 if group is None else group.all_reduce(torch.tensor([1.0 + group.rank])).item()
        return gathered, total, twice

    everybody = [0, 1, 2]
    assert run(work, 3) == [(everybody, 3.0, [3.0, 3.0]), (everybody, 0.0, [3.0, 3.0]), (everybody, 3.0, [3.0, 3.0])]


def test_a_send_is_over_when_it_has_been_received(run: Callable[..., list[Any]]) -> None:
    received = threading.Event()

    def work(transport: Any) -> Any:
        if transport.rank == 0:
            ticket = transport.isend(torch.ones(1), 1)
            with pytest.raises(PeerTimeout):
                ticket.wait(0.05)
            received.set()
            return ticket.wait(SECONDS)
        assert received.wait(SECONDS)
        return transport.recv(torch.zeros(1), 0).item()

    assert run(work, 2) == [None, 1.0]


def test_a_failure_reaches_peers_that_wait_on_a_channel(run: Callable[..., list[Any]]) -> None:
    def work(transport: Any) -> None:
        channel = transport.channel("side").channel("deeper")
        if transport.rank == 2:
            raise ValueError("the data is bad")
        channel.barrier()

    for rank, error in enumerate(run(work, 3)[:2]):
        assert isinstance(error, PeerLost)
        assert (error.rank, error.peer) == (rank, 2)
        assert "the data is bad" in str(error)


def test_closing_ends_channels_and_what_waits_on_them(page: dict[str, Any]) -> None:
    transport = page["QueueTransport"]({}, 0, 2, timeout=SECONDS)
    channel = transport.channel("side")
    ticket = channel.irecv(torch.zeros(1), 1)
    while not channel.operation:
        os.sched_yield()
    transport.close()
    with pytest.raises(TransportClosed):
        ticket.wait(SECONDS)
    with pytest.raises(TransportClosed):
        channel.barrier()


def test_an_abort_is_told_by_every_later_call_of_the_rank_and_of_its_peers(page: dict[str, Any]) -> None:
    queues: dict[Any, Any] = {}
    first, second = (page["QueueTransport"](queues, rank, 2, timeout=SECONDS) for rank in range(2))
    channels = [first.channel("side"), second.channel("side")]
    first.abort(ValueError("the data is bad"))
    for each in (second, channels[1]):
        with pytest.raises(PeerLost, match="the data is bad"):
            each.recv(torch.zeros(1), 0)
    for each in (first, channels[0]):
        with pytest.raises(TransportError, match=r"failed earlier.*the data is bad") as caught:
            each.recv(torch.zeros(1), 1)
        assert caught.value.rank == 0
    first.close()
    second.close()


def test_waits_end_and_bad_arguments_are_refused(page: dict[str, Any]) -> None:
    with page["QueueTransport"]({}, 0, 2, timeout=SECONDS) as transport:
        with pytest.raises(UsageError, match="cannot exchange with itself"):
            transport.send(torch.ones(1), 0)
        with pytest.raises(PeerTimeout, match=r"rank 0 waited .* for rank 1 in exchange"):
            transport.recv(torch.zeros(1), 1, timeout=0.01)
        assert transport.failed


def test_observers_see_what_runs_on_its_channels(run: Callable[..., list[Any]]) -> None:
    class Probe:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def operation(self, name: str, sent: Any, work: Any, *, in_background: bool) -> Any:
            self.seen.append(name)
            return work

        def within(self, ranks: Any) -> Probe:
            return self

    def work(transport: Any) -> list[str]:
        early = transport.channel("early")
        probe = Probe()
        transport.observe(probe)
        late = transport.channel("late")
        for each in (transport, early, late):
            each.barrier()
        early.all_reduce(torch.ones(1))
        return probe.seen

    assert run(work, 2) == [["barrier", "barrier", "barrier", "all_reduce"]] * 2
