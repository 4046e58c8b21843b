"""Bytes and JSON values between ranks, sent as uint8 tensors: for small facts, not for training data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from murmura.transports.base import Transport


def bytes_to_tensor(data: bytes) -> Tensor:
    """Copy `data` into a new uint8 tensor in host memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def bytes_from_tensor(tensor: Tensor) -> bytes:
    """Return the bytes of a uint8 tensor, whichever device holds it."""
    return tensor.cpu().numpy().tobytes()


def all_gather_bytes(transport: Transport, data: bytes, timeout: float | None = None) -> list[bytes]:
    """Return every rank's `data`, in rank order; lengths may differ. Collective."""
    gathered = transport.all_gather(bytes_to_tensor(data), timeout=timeout)
    return [bytes_from_tensor(each) for each in gathered]


def all_gather_json(transport: Transport, value: Any, timeout: float | None = None) -> list[Any]:
    """Return every rank's `value`, in rank order; values are whatever JSON can hold. Collective."""
    return [json.loads(data) for data in all_gather_bytes(transport, json.dumps(value).encode(), timeout)]


def broadcast_bytes(transport: Transport, data: bytes | None, src: int = 0) -> bytes:
    """Return rank `src`'s `data` on every rank; on the others `data` is not looked at. Collective."""
    own = bytes_to_tensor(data or b"") if transport.rank == src else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([own.numel()])
    transport.broadcast(length, src)
    payload = own if transport.rank == src else torch.empty(int(length), dtype=torch.uint8)
    transport.broadcast(payload, src)
    return bytes_from_tensor(payload)


def exchange_bytes(transport: Transport, outgoing: Mapping[int, bytes], num_bytes: int) -> dict[int, bytes]:
    """Send `outgoing[peer]` to each peer and return what each of these sent, which must have `num_bytes`."""
    sends = [(bytes_to_tensor(data), peer) for peer, data in outgoing.items()]
    incoming = {peer: torch.empty(num_bytes, dtype=torch.uint8) for peer in outgoing}
    transport.exchange(sends, [(out, peer) for peer, out in incoming.items()])
    return {peer: bytes_from_tensor(out) for peer, out in incoming.items()}
