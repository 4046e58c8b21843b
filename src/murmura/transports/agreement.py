"""Comparing calls before they are carried out, on transports that cannot look at each other's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from murmura.transports.base import Pairs, Transport
from murmura.transports.checks import describe
from murmura.transports.failures import mismatch

Move = Callable[[Pairs, Pairs, float], None]
"""An exchange of flat tensors where the transport works: sends, recvs, seconds."""

_TEXT_BYTES = 256


def _note(text: str, device: torch.device) -> Tensor:
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _blank(device: torch.device) -> Tensor:
    return torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=device)


def _text(note: Tensor) -> str:
    return bytes(note.tolist()).rstrip(b"\0").decode(errors="replace")


def on_collective(
    move: Move, call: str, rank: int, world_size: int, operation: str, timeout: float, device: torch.device
) -> None:
    """Tell all ranks `call` and hear theirs; raise `CollectiveMismatch` with the table if they differ."""
    peers = [peer for peer in range(world_size) if peer != rank]
    notes = {peer: _blank(device) for peer in peers}
    own = _note(call, device)
    move([(own, peer) for peer in peers], [(notes[peer], peer) for peer in peers], timeout)
    calls = {peer: _text(note) for peer, note in notes.items()}
    calls[rank] = _text(own)
    if len(set(calls.values())) > 1:
        raise mismatch(rank, operation, calls)


def on_split(parent: Transport, name: str, members: Sequence[int], word: int = 0) -> list[int]:
    """Compare what the members of a split believe to be splitting off; return everybody's `word`, in their order."""

    def work() -> list[int]:
        call = f"split({name!r}) of ranks {list(members)}"
        own = torch.tensor([word])
        peers = [peer for peer in members if peer != parent.rank]
        notes = {peer: _blank(torch.device("cpu")) for peer in peers}
        words = {peer: torch.zeros_like(own) for peer in peers}
        sends = [(_note(call, torch.device("cpu")), peer) for peer in peers] + [(own, peer) for peer in peers]
        recvs = [(notes[peer], peer) for peer in peers] + [(words[peer], peer) for peer in peers]
        parent.exchange(sends, recvs)
        calls = {peer: _text(note) for peer, note in notes.items()}
        calls[parent.rank] = _text(_note(call, torch.device("cpu")))
        if len(set(calls.values())) > 1:
            raise mismatch(parent.rank, "split", calls)
        words[parent.rank] = own
        return [int(words[member]) for member in members]

    result: list[int] = parent._run("exchange", work, False)
    return result


def on_exchange(move: Move, sends: Pairs, recvs: Pairs, rank: int, timeout: float, device: torch.device) -> None:
    """Tell receivers what is coming and hear what they want, and the other way round; both ends raise if it differs."""
    coming = [(_blank(device), src) for _, src in recvs]
    move([(_note(describe(tensor), device), dst) for tensor, dst in sends], coming, timeout)
    wanted = [(_blank(device), dst) for _, dst in sends]
    move([(_note(describe(out), device), src) for out, src in recvs], wanted, timeout)
    for (tensor, dst), (note, _) in zip(sends, wanted, strict=True):
        if _text(note) != describe(tensor):
            calls = {rank: f"send(dst={dst}) of {describe(tensor)}", dst: f"recv(src={rank}) of {_text(note)}"}
            raise mismatch(rank, "exchange", calls)
    for (out, src), (note, _) in zip(recvs, coming, strict=True):
        if _text(note) != describe(out):
            calls = {src: f"send(dst={rank}) of {_text(note)}", rank: f"recv(src={src}) of {describe(out)}"}
            raise mismatch(rank, "exchange", calls)
