"""Who may join: only those who know the secret; others get neither tensors nor a say, and everybody is told why."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from murmura import DistributedConfig, ProcessGroupTransport, RendezvousError, Transport, connect
from murmura.transports.challenge import NONCE_BYTES, TAG_BYTES
from murmura.transports.rendezvous import file_store, serve_store
from murmura.transports.signed_store import SignedStore

SECONDS = 10.0
ADVICE = r"the same secret \(murmura run --secret-file FILE, or MURMURA_SECRET\)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_threads(*programs: Callable[[], Any]) -> list[Any]:
    """What each program returned or raised."""
    with ThreadPoolExecutor(len(programs)) as pool:
        futures: list[Future[Any]] = [pool.submit(program) for program in programs]
        return [future.exception() or future.result() for future in futures]


def average(transport: Transport) -> float:
    with transport:
        return float(transport.channel("other").all_reduce(torch.tensor([float(transport.rank)]), "mean").item())


def join(port: int, rank: int, secret: str | None, seconds: float = SECONDS) -> float:
    config = DistributedConfig(
        world_size=2,
        rank=rank,
        coordinator_addr=f"127.0.0.1:{port}",
        transport="gloo",
        job_id="job",
        secret=secret,
        timeout=seconds,
    )
    return average(connect(config))


def test_ranks_that_share_a_secret_work_as_without_one() -> None:
    port = free_port()
    assert as_threads(*(lambda rank=rank: join(port, rank, "swordfish") for rank in range(2))) == [0.5, 0.5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_works_with_a_secret_too() -> None:
    address = f"127.0.0.1:{free_port()}"
    config = DistributedConfig(world_size=1, rank=0, coordinator_addr=address, transport="nccl", secret="swordfish")
    with connect(config) as transport:
        tensor = torch.ones(1000, device="cuda")
        assert torch.equal(transport.channel("other").all_reduce(tensor), torch.ones(1000, device="cuda"))


@pytest.mark.parametrize("secrets", [("swordfish", "goldfish"), ("swordfish", None), (None, "swordfish")])
def test_a_wrong_or_missing_secret_ends_both_sides_before_they_connect(secrets: tuple[str | None, str | None]) -> None:
    port = free_port()
    store = serve_store("127.0.0.1", port, 2, SECONDS)  # as a launcher serves it
    began = time.monotonic()
    errors = as_threads(*(lambda rank=rank: join(port, rank, secrets[rank]) for rank in range(2)))
    assert time.monotonic() - began < SECONDS
    for error in errors:
        with pytest.raises(RendezvousError, match=ADVICE):
            raise error
        assert "fish" not in str(error)
    assert store.check(["murmura/job/rendezvous", "murmura/job/here/1"]), "they did not meet"
    # These two, what rank 0 made of them, and one of torch's own: nobody told where it can be reached.
    assert store.num_keys() <= 4


def test_a_rank_that_finds_the_store_gone_says_who_served_it() -> None:
    port = free_port()
    served = [serve_store("127.0.0.1", port, 2, SECONDS)]
    left = threading.Timer(0.3, served.clear)
    left.start()
    with pytest.raises(RendezvousError, match="rank 1 lost the store while the ranks were signing in"):
        join(port, 1, None, seconds=1.5)
    left.join()


def test_what_a_stranger_writes_or_moves_in_the_store_is_not_believed(tmp_path: Path) -> None:
    plain = file_store(str(tmp_path / "store"), 1)
    signed = SignedStore(plain, "swordfish", "job")
    signed.set("here/0", b"genuine")
    assert signed.get("here/0") == b"genuine"
    genuine = plain.get("here/0")
    forgeries = {
        "here/0": genuine[:-1] + b"x",
        "here/1": genuine,
        "here/2": b"genuine",
        "here/3": b"",
        "here/4": SignedStore(plain, "swordfish", "another job").sign(b"value", b"here/4", b"x") + b"x",
    }
    for key, value in forgeries.items():
        plain.set(key, value)
        with pytest.raises(RendezvousError, match=rf"job/{key} was not written by someone who knows"):
            signed.get(key)


class Thief(SignedStore):
    """Has come by signed values, by reading the store and repeating them, but does not know the secret."""

    def sign(self, *words: bytes) -> bytes:
        return bytes(TAG_BYTES) if words[0] == b"answer" else super().sign(*words)


class Forger(SignedStore):
    """Signs in with stolen values, then gives an address of its own choice as rank 1's."""

    def sign(self, *words: bytes) -> bytes:
        return bytes(TAG_BYTES) if self._scope.endswith("/group") and words[1] == b"0/1" else super().sign(*words)


def stores(tmp_path: Path, other: type[SignedStore]) -> tuple[SignedStore, SignedStore]:
    path = str(tmp_path / "store")
    return SignedStore(file_store(path, 2), "swordfish", "job"), other(file_store(path, 2), "swordfish", "job")


def test_a_stranger_with_stolen_values_is_found_out_by_a_fresh_question(tmp_path: Path) -> None:
    honest, stolen = stores(tmp_path, Thief)
    got = torch.zeros(4)

    def steal() -> None:
        with ProcessGroupTransport.join(stolen, 1, 2, timeout=SECONDS) as transport:
            transport.broadcast(got)

    def give() -> None:
        with ProcessGroupTransport.join(honest, 0, 2, timeout=SECONDS) as transport:
            transport.broadcast(torch.ones(4))

    refused, fate = as_threads(give, steal)
    with pytest.raises(RendezvousError, match=rf"rank 0 sent no tensor to rank 1: .* {ADVICE}"):
        raise refused
    assert refused.missing == (1,)
    assert isinstance(fate, RendezvousError)
    assert torch.equal(got, torch.zeros(4))


def test_an_address_that_a_stranger_left_is_not_connected_to(tmp_path: Path) -> None:
    honest, forged = stores(tmp_path, Forger)
    refused, _ = as_threads(
        *(
            lambda store=store, rank=rank: ProcessGroupTransport.join(store, rank, 2, timeout=2.0).close()
            for rank, store in enumerate((honest, forged))
        )
    )
    with pytest.raises(RendezvousError, match=rf"job/\w+/group/0/1 was not written by .* {ADVICE}"):
        raise refused
    for thread in threading.enumerate():  # which torch holds inside its connect until the deadline
        if thread.name == "murmura-rendezvous":
            thread.join(SECONDS)


@pytest.mark.parametrize("habit", ["repeats", "is silent"])
def test_a_stranger_on_the_line_cannot_hand_back_the_question_and_silence_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, habit: str
) -> None:
    honest, stolen = stores(tmp_path, Thief)
    over = threading.Event()

    def listen(transport: Transport) -> None:
        if habit == "repeats":  # the honest rank's own words, question and answer, come back to it
            for num_bytes in (NONCE_BYTES, TAG_BYTES):
                word = torch.empty(num_bytes, dtype=torch.uint8)
                transport.recv(word, 0)
                transport.send(word, 0)
        over.wait(SECONDS)

    def stay() -> None:
        with ProcessGroupTransport.join(stolen, 1, 2, timeout=SECONDS) as transport:
            listen(transport)

    def ask() -> None:
        try:
            ProcessGroupTransport.join(honest, 0, 2, timeout=1.0 if habit == "is silent" else SECONDS).close()
        finally:
            over.set()

    prove = "murmura.transports.process_group.prove_to_each_other"
    genuine = ProcessGroupTransport.join.__func__.__globals__["prove_to_each_other"]  # type: ignore[attr-defined]
    monkeypatch.setattr(prove, lambda transport, store: None if isinstance(store, Thief) else genuine(transport, store))
    refused, _ = as_threads(ask, stay)
    story = "sent no tensor to rank 1" if habit == "repeats" else "asked the others to prove .* not all answered"
    with pytest.raises(RendezvousError, match=f"rank 0 {story}.* {ADVICE}"):
        raise refused
