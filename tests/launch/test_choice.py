"""Which transport a world takes, with invented numbers of hosts and GPUs, and what ranks that disagree are told."""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from murmura import ConfigError, DistributedConfig, InProcessTransport, PeerLost, RendezvousError, connect
from murmura.transports import checks
from murmura.transports.choice import Claim, choose
from murmura.types import TransportKind


def cpu_ranks(count: int, **choices: Any) -> list[Claim]:
    return [Claim(**choices)] * count


def gpu_ranks(*gpus: str, **choices: Any) -> list[Claim]:
    return [Claim(device="cuda", gpu=gpu, **choices) for gpu in gpus]


WORLDS: list[tuple[list[Claim], list[int], str | None, str]] = [
    (cpu_ranks(1), [0], None, "in_process"),
    (cpu_ranks(1), [0], "gloo", "in_process"),
    (cpu_ranks(4), [0, 0, 0, 0], None, "shared_memory"),
    (cpu_ranks(4), [0, 0, 1, 1], None, "hierarchical"),
    (cpu_ranks(3), [0, 1, 0], None, "hierarchical"),
    (cpu_ranks(3), [0, 1, 2], None, "gloo"),
    (gpu_ranks("a", "b"), [0, 0], None, "nccl"),
    (gpu_ranks("a", "a"), [0, 0], None, "shared_memory"),
    (gpu_ranks("a", "b", "b"), [0, 0, 0], None, "shared_memory"),
    (gpu_ranks("", ""), [0, 0], None, "shared_memory"),  # without NCCL
    (gpu_ranks("a", "b", "a", "b"), [0, 0, 1, 1], None, "nccl"),  # the same numbers on two hosts
    (gpu_ranks("a", "a", "b", "b"), [0, 0, 1, 1], None, "hierarchical"),
    (gpu_ranks("a", "a"), [0, 1], None, "nccl"),
    (gpu_ranks("", ""), [0, 1], None, "gloo"),
    (gpu_ranks("a", "a"), [0, 0], "nccl", "nccl"),  # the user's group knows how
    (gpu_ranks("a", "b"), [0, 0], "gloo", "shared_memory"),
    (gpu_ranks("a", "b", "c"), [0, 0, 1], "gloo", "hierarchical"),
    (cpu_ranks(2), [0, 0], "gloo", "shared_memory"),
    (cpu_ranks(2), [0, 0], "", "shared_memory"),  # an NCCL group, which has nothing for the CPU
    (cpu_ranks(4), [0, 0, 1, 1], "gloo", "hierarchical"),
    (cpu_ranks(2, transport=TransportKind.GLOO), [0, 0], None, "gloo"),
    (cpu_ranks(2, transport=TransportKind.SHARED_MEMORY), [0, 0], "nccl", "shared_memory"),
    (gpu_ranks("a", "b", transport=TransportKind.GLOO), [0, 0], "nccl", "gloo"),
]


def test_what_a_world_takes() -> None:
    for claims, hosts, group, wanted in WORLDS:
        choice = choose(claims, hosts, group=group)
        assert choice.kind == wanted, (claims, hosts, group)
        assert choice.why


def test_why_ranks_on_gpus_do_not_take_nccl() -> None:
    assert choose(gpu_ranks("a", "a"), [0, 0]).why == "2 cuda ranks on one host, of which several share a GPU"
    for gpus in (("", ""), ("a", "")):
        assert "not all of which have CUDA, NCCL and an address" in choose(gpu_ranks(*gpus), [0, 0]).why
    assert "whose process group is not one of NCCL" in choose(gpu_ranks("a", "b"), [0, 0], group="gloo").why


def test_a_rank_s_claim_survives_its_way() -> None:
    claim = Claim(TransportKind.GLOO, "MURMURA_TRANSPORT", "cuda", "GPU-1")
    assert Claim.from_text(claim.to_text(), 3) == claim
    with pytest.raises(RendezvousError, match=r"rank 3 signed in with.*same version"):
        Claim.from_text("[1, 2]", 3)


def test_who_said_what_is_named() -> None:
    told = Claim(TransportKind.GLOO, "MURMURA_TRANSPORT")
    with pytest.raises(ConfigError, match=r"ranks 0, 2: transport='gloo' \(by MURMURA_TRANSPORT\); rank 1: .*'auto'"):
        choose([told, Claim(), told], [0, 0, 0])
    with pytest.raises(ConfigError, match=r"rank 0: tensors on 'cpu'; rank 1: tensors on 'cuda'.*shared_memory"):
        choose([Claim(), *gpu_ranks("a")], [0, 0])
    mixed = [Claim(TransportKind.GLOO), *gpu_ranks("a", transport=TransportKind.GLOO)]
    assert choose(mixed, [0, 0]).kind == "gloo"
    with pytest.raises(ConfigError, match="check='always'"):
        choose([Claim(), Claim(check=checks.Check.ALWAYS)], [0, 0])
    with pytest.raises(ConfigError, match=r"3 ranks are on 2.*hierarchical"):
        choose(cpu_ranks(3, transport=TransportKind.SHARED_MEMORY), [0, 1, 1])


def meet(rank: int, told: str, address: str) -> str:
    config = DistributedConfig(
        world_size=3, rank=rank, coordinator_addr=address, job_id=f"disagree-{address}", timeout=20.0
    )
    began = time.monotonic()
    # On a busy machine a rank may hear it from another that has found it first.
    with pytest.raises((ConfigError, PeerLost, RendezvousError)) as caught, connect(config, transport=told):
        pass
    assert time.monotonic() - began < 10  # two seconds, on a machine that is not busy
    return str(caught.value)


@pytest.mark.timed
@pytest.mark.parametrize("kinds", [("auto", "gloo", "auto"), ("gloo", "shared_memory", "gloo")])
def test_ranks_that_were_told_different_things_hear_so_at_once(kinds: tuple[str, ...]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with ThreadPoolExecutor(3) as pool:
        for said in pool.map(meet, range(3), kinds, [address] * 3):
            assert f"rank 1: transport='{kinds[1]}" in said
            assert f"transport='{kinds[0]}'" in said  # by rank 0, rank 2 or both, as far as they have come


def test_connect_refuses_what_it_does_not_know() -> None:
    for arguments, words in (
        ({"transport": "pigeon"}, "transport='pigeon' is unknown"),
        ({"device": "abacus"}, "device='abacus' is no device"),
        ({"timeout": -1.0}, "timeout=-1.0"),
        ({"check": "never"}, "check='never' is unknown"),
    ):
        with pytest.raises(ConfigError, match=words):
            connect(DistributedConfig(world_size=1, rank=0), **arguments)  # type: ignore[arg-type]


def test_arguments_come_before_the_config(caplog: pytest.LogCaptureFixture) -> None:
    config = DistributedConfig(world_size=1, rank=0, transport="gloo", timeout=3.0)
    with (
        caplog.at_level(logging.INFO, "murmura"),
        connect(config, transport="in_process", timeout=7.0, device="cpu", check="always") as transport,
    ):
        assert isinstance(transport, InProcessTransport)
        assert (transport.timeout, transport.local_rank) == (7.0, 0)
    assert "rank 0 of 1 takes transport 'in_process'" in caplog.text


def test_the_local_rank_counts_the_ranks_of_the_host() -> None:
    group = InProcessTransport.create_group(5, hosts=[0, 1, 0, 1, 1])
    assert [transport.local_rank for transport in group] == [0, 0, 1, 1, 2]
    for transport in group:
        transport.close()


def test_the_environment_may_name_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DistributedConfig.from_env({"MURMURA_DEVICE": "cpu"}).backend == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert DistributedConfig.from_env({"MURMURA_DEVICE": "cuda"}).backend == "cuda"
    with pytest.raises(ConfigError, match="abacus"):
        DistributedConfig.from_env({"MURMURA_DEVICE": "abacus"})


def test_staging_is_announced_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    checks._announce_staging.cache_clear()
    elsewhere = torch.empty(3, device="meta")
    for _ in range(3):
        checks.flatten(elsewhere, torch.device("cpu"), load=False)
    assert len(caplog.records) == 1
    assert "staged through host memory" in caplog.text
    assert "init_process_group('nccl')" in caplog.text
    checks._announce_staging.cache_clear()
