"""Bytes and JSON over tensors: every length, also none, and ranks that bring different ones."""

from __future__ import annotations

import pytest

from murmura import Transport, run_world
from murmura.transports.objects import all_gather_bytes, all_gather_json, broadcast_bytes, exchange_bytes


def test_all_gather_bytes_takes_other_lengths_on_every_rank() -> None:
    every = [b"", b"\x00\xff", bytes(range(256))]
    assert run_world(lambda transport: all_gather_bytes(transport, every[transport.rank]), 3) == [every] * 3


def test_all_gather_json_gives_every_rank_every_value() -> None:
    every = [{"a": [1, None]}, "b"]
    assert run_world(lambda transport: all_gather_json(transport, every[transport.rank]), 2) == [every] * 2


@pytest.mark.parametrize("data", [b"", b"\x00\xff\x00", b"x" * 1000])
def test_broadcast_bytes_needs_no_length_elsewhere(data: bytes) -> None:
    def work(transport: Transport) -> bytes:
        return broadcast_bytes(transport, data if transport.rank == 1 else None, src=1)

    assert run_world(work, 3) == [data] * 3


def test_exchange_bytes_returns_what_each_peer_sent() -> None:
    def work(transport: Transport) -> dict[int, bytes]:
        peers = [peer for peer in range(3) if peer != transport.rank]
        return exchange_bytes(transport, {peer: bytes([transport.rank, peer]) for peer in peers}, 2)

    assert run_world(work, 3)[1] == {0: b"\x00\x01", 2: b"\x02\x01"}
