"""DDP and connect() where the user has called init_process_group: that group says who the ranks are."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import murmura
from murmura import ConfigError, InProcessTransport, Transport, UsageError, run_world
from murmura.transports.connect import transport_for
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import file_store

SECONDS = 40.0


def run_ranks(work: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return run_world(work, world_size, *args, kind="processes", timeout=SECONDS)


def initialise(launcher: Transport, where: str) -> None:
    """As users do who have no launcher: nothing in the environment tells of other ranks."""
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys()
    place: dict[str, Any] = {"rank": launcher.rank, "world_size": launcher.world_size}
    if "://" in where:
        dist.init_process_group("gloo", init_method=where, **place)
    else:
        dist.init_process_group("gloo", store=file_store(where, launcher.world_size), **place)


def mean_gradient(ddp: nn.Module, value: float) -> float:
    ddp.zero_grad()
    ddp(torch.full((1, 1), value)).sum().backward()
    gradient = next(ddp.parameters()).grad
    assert gradient is not None
    return gradient.item()


def train_ten(launcher: Transport, where: str) -> tuple[set[str], list[float], list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("murmura").addHandler(handler)
    logging.getLogger("murmura").setLevel(logging.INFO)
    initialise(launcher, where)
    try:
        ddps = []
        for index in range(10):  # some are closed before the next is made, as in a sweep
            ddps.append(murmura.DDP(nn.Linear(1, 1)))
            if index % 3 == 2:
                ddps.pop(0).close()
        kinds = {type(ddp.transport).__name__ for ddp in ddps}
        means = [mean_gradient(ddp, float(launcher.rank)) for ddp in ddps]
        for ddp in ddps:
            ddp.close()
        total = torch.ones(1)
        dist.all_reduce(total)  # the group itself is left as it was
        assert total.item() == launcher.world_size
    finally:
        dist.destroy_process_group()
    return kinds, means, records


@pytest.mark.slow
@pytest.mark.parametrize("how", ["store", "file", "tcp"])
def test_ten_models_on_the_default_group(how: str, tmp_path: Path) -> None:
    where = {"store": "", "file": "file://"}.get(how, "") + str(tmp_path / "store")
    if how == "tcp":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    results = run_ranks(train_ten, 2, where)
    for kinds, means, records in results:
        assert kinds == {"SharedMemoryTransport"}
        assert means == [0.5] * 7
        assert len(records) == 10
        assert "takes transport 'shared_memory': 2 cpu ranks on one host" in records[0]
        assert "the default process group" in records[0]


def train_in_a_part(launcher: Transport, where: str) -> Any:
    initialise(launcher, f"file://{where}")
    try:
        part = dist.new_group([2, 1])
        if launcher.rank == 0:
            with pytest.raises(UsageError, match="no process group that this rank is a member of"):
                transport_for(nn.Linear(1, 1), process_group=part)
            return None
        os.environ["MURMURA_TRANSPORT"] = "gloo"  # the argument comes before it
        with transport_for(nn.Linear(1, 1), process_group=part) as transport:
            ranks = transport.all_gather(torch.tensor([float(launcher.rank)]))
            return type(transport).__name__, transport.rank, transport.world_size, [rank.item() for rank in ranks]
    finally:
        os.environ.pop("MURMURA_TRANSPORT", None)
        dist.barrier()
        dist.destroy_process_group()


def test_the_ranks_of_a_group_that_is_given(tmp_path: Path) -> None:
    outside, first, second = run_ranks(train_in_a_part, 3, str(tmp_path / "store"))
    assert outside is None
    assert first == ("SharedMemoryTransport", 0, 2, [1.0, 2.0])
    assert second == ("SharedMemoryTransport", 1, 2, [1.0, 2.0])


def take_what_the_variable_says(launcher: Transport, where: str) -> Any:
    initialise(launcher, f"file://{where}")
    found = []
    try:
        for kind in ("gloo", "hierarchical", "shared_memory"):
            os.environ["MURMURA_TRANSPORT"] = kind
            models = [murmura.DDP(nn.Linear(1, 1)) for _ in range(2)]
            means = [mean_gradient(ddp, float(launcher.rank)) for ddp in models]
            found.append((type(models[0].transport).__name__, means))
            for ddp in models:
                ddp.close()
        os.environ["MURMURA_TRANSPORT"] = "in_process"
        with pytest.raises(ConfigError, match=f"rank {launcher.rank} of 2 in the default process group"):
            murmura.DDP(nn.Linear(1, 1))
    finally:
        del os.environ["MURMURA_TRANSPORT"]
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_the_variable_comes_before_the_default_group_s_choice_and_keeps_its_ranks(tmp_path: Path) -> None:
    for found in run_ranks(take_what_the_variable_says, 2, str(tmp_path / "store")):
        assert found == [
            ("ProcessGroupTransport", [0.5, 0.5]),
            ("HierarchicalTransport", [0.5, 0.5]),
            ("SharedMemoryTransport", [0.5, 0.5]),
        ]


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
def test_a_fake_group_runs_as_if_all_ranks_held_the_same() -> None:
    ddp = murmura.DDP(nn.Linear(1, 1))
    assert isinstance(ddp.transport, ProcessGroupTransport)
    assert (ddp.transport.rank, ddp.transport.world_size) == (1, 4)
    assert mean_gradient(ddp, 3.0) == 3.0
    ddp.close()


def test_a_group_of_one_needs_nobody(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=file_store(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with transport_for(nn.Linear(1, 1)) as transport:
            assert isinstance(transport, InProcessTransport)
    finally:
        dist.destroy_process_group()


def test_a_transport_and_a_group_are_one_too_many() -> None:
    (alone,) = InProcessTransport.create_group(1)
    with pytest.raises(ConfigError, match="Pass one of them"):
        transport_for(nn.Linear(1, 1), transport=alone, process_group=alone)
    with pytest.raises(UsageError, match="process_group=7"):
        transport_for(nn.Linear(1, 1), process_group=7)
    alone.close()
