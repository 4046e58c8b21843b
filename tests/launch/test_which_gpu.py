"""On which GPU a rank's NCCL works, with invented GPUs: one each, and a word to whoever has none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from murmura import ConfigError, DistributedConfig, ProcessGroupTransport, connect
from murmura.launch import processes
from murmura.transports import connect as connecting
from murmura.transports import devices
from murmura.transports.connect import _Options
from murmura.transports.user_group import UserGroup
from murmura.types import TransportKind


@pytest.fixture
def gpu_at_join(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs, and which of them was the current one when this process joined a group."""
    found: list[int] = []
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: current.append(number))
    monkeypatch.setattr(ProcessGroupTransport, "join", lambda *args, **options: found.append(current[-1]))
    return found


def spec(tmp_path: Path, rank: int, transport: str = "nccl") -> processes.RankSpec:
    kind = TransportKind(transport)
    return processes.RankSpec(rank, 4, "", b"", None, 5.0, 1, kind, str(tmp_path / "store"))


def test_ranks_of_run_world_have_a_gpu_each(tmp_path: Path, gpu_at_join: list[int]) -> None:
    for rank in range(4):
        processes._join_over(spec(tmp_path, rank))
    assert gpu_at_join == [0, 1, 2, 3]


def test_ranks_of_run_world_on_gloo_take_no_gpu(tmp_path: Path, gpu_at_join: list[int]) -> None:
    processes._join_over(spec(tmp_path, 3, "gloo"))
    assert gpu_at_join == [0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="torch finds none here"):
        processes._join_over(spec(tmp_path, 0))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_connect_over_nccl_takes_the_gpu_of_the_local_rank(device: str | None, gpu_at_join: list[int]) -> None:
    config = DistributedConfig(
        world_size=4, rank=2, local_rank=2, coordinator_addr="127.0.0.1:1", backend="cpu", transport="nccl"
    )
    options = _Options.of(device, None, None, None)
    assert options.gpu(config.transport, config.backend, config.local_rank) == 2
    assert options.gpu(TransportKind.GLOO, config.backend, config.local_rank) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_connect_over_nccl_without_a_gpu_is_refused_before_anybody_is_waited_for() -> None:
    config = DistributedConfig(world_size=2, rank=1, coordinator_addr="127.0.0.1:1", transport="nccl", timeout=60.0)
    with pytest.raises(ConfigError, match="torch finds none here"):
        connect(config)


class Group:
    """A process group of two ranks, as far as one is asked before ranks meet; `backends` are by device."""

    def __init__(self, backends: dict[str, str]) -> None:
        self._backends = backends

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def get_group_store(self) -> Any:
        return SimpleNamespace()

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._backends:
            raise RuntimeError("no backend for that device")
        return SimpleNamespace(name=lambda: self._backends[device.type])


@pytest.mark.parametrize(
    ("backends", "argument", "expected"),
    [
        ({"cuda": "nccl"}, None, ("cuda", 3)),  # nothing else can be meant
        ({"cuda": "nccl"}, "cpu", ("cpu", None)),
        ({"cuda": "nccl", "cpu": "gloo"}, None, ("cpu", None)),
        ({"cuda": "nccl", "cpu": "gloo"}, "cuda", ("cuda", 3)),
        ({"cpu": "gloo"}, None, ("cpu", None)),
    ],
)
def test_ranks_of_a_group_are_on_what_it_is_for_and_on_the_gpu_of_their_local_rank(
    backends: dict[str, str],
    argument: str | None,
    expected: Any,
    gpu_at_join: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []

    class Rendezvous:
        def __init__(self, gpu: int | None, **options: Any) -> None:
            self.gpu = gpu

        def choose_and_join(self, claim: Any) -> None:
            found.append((claim.device, self.gpu))

    monkeypatch.setattr(connecting, "StoreRendezvous", Rendezvous)
    monkeypatch.setattr(devices, "gpu_identity", lambda device, local_rank: "")
    monkeypatch.setenv("LOCAL_RANK", "3")
    connecting._connect_by_group(UserGroup(Group(backends), "the group"), _Options.of(argument, None, None, None))
    assert found == [expected]


def test_gpus_without_an_address_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's ranks would have nowhere to meet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "gpu_identity", lambda device, local_rank: f"GPU-{local_rank}")

    def sign_in(key: str, rank: int, world_size: int, claim: str, *_: Any, **options: Any) -> list[str]:
        return [claim, claim.replace("GPU-0", "GPU-1")]

    def joins(kind: str) -> Any:
        return lambda *args, **options: SimpleNamespace(kind=kind)

    monkeypatch.setattr(connecting.one_host, "sign_in", sign_in)
    monkeypatch.setattr(connecting.SharedMemoryTransport, "join", joins("shared_memory"))
    monkeypatch.setattr(connecting, "_join_over_a_network", joins("nccl"))
    for address, kind in (("127.0.0.1:1", "nccl"), ("", "shared_memory")):
        config = DistributedConfig(world_size=2, rank=0, coordinator_addr=address, backend="cuda", job_id="which gpu")
        assert connect(config).kind == kind  # type: ignore[attr-defined]
