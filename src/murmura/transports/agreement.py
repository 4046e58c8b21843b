"""Comparing calls before they are carried out, on transports that cannot look at each other's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.transports.base import Pairs, Transport
from murmura.transports.checks import describe
from murmura.transports.error_reporter import Reporter
from murmura.transports.objects import bytes_from_tensor, bytes_to_tensor, exchange_bytes

Move = Callable[[Pairs, Pairs, float], None]
"""An exchange of flat tensors where the transport works: sends, recvs, seconds."""

_TEXT_BYTES = 256
_DATA, _NOTICE, _ANSWER = 0, 2, 3  # tags of messages


def _padded(text: str) -> bytes:
    return text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")


def _unpadded(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def _note(text: str, device: torch.device) -> Tensor:
    return bytes_to_tensor(_padded(text)).to(device)


def _blank(device: torch.device) -> Tensor:
    return torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device=device)


def _text(note: Tensor) -> str:
    return _unpadded(bytes_from_tensor(note))


def on_collective(
    move: Move, call: str, rank: int, reporter: Reporter, operation: str, timeout: float, device: torch.device
) -> None:
    """Tell all ranks `call` and hear theirs; raise `CollectiveMismatch` with the table if they differ."""
    peers = [peer for peer in range(reporter.world_size) if peer != rank]
    notes = {peer: _blank(device) for peer in peers}
    own = _note(call, device)
    move([(own, peer) for peer in peers], [(notes[peer], peer) for peer in peers], timeout)
    calls = {peer: _text(note) for peer, note in notes.items()}
    calls[rank] = _text(own)
    if len(set(calls.values())) > 1:
        raise reporter.mismatch(operation, calls)


def on_split(parent: Transport, name: str, members: Sequence[int], word: int = 0) -> list[int]:
    """Compare what the members of a split believe to be splitting off; return everybody's `word`, in their order."""

    def work() -> list[int]:
        own = _padded(f"split({name!r}) of ranks {list(members)}") + word.to_bytes(8, "little")
        heard = exchange_bytes(parent, {peer: own for peer in members if peer != parent.rank}, len(own))
        heard[parent.rank] = own
        calls = {peer: _unpadded(data[:_TEXT_BYTES]) for peer, data in heard.items()}
        if len(set(calls.values())) > 1:
            raise parent.reporter.mismatch("split", calls)
        return [int.from_bytes(heard[member][_TEXT_BYTES:], "little") for member in members]

    result: list[int] = parent.run_in_turn("exchange", work)
    return result


def exchange(
    group: Any,
    wait: Callable[[Any], None],
    outgoing: Pairs,
    incoming: Pairs,
    sends: Pairs,
    recvs: Pairs,
    reporter: Reporter,
) -> None:
    """An exchange over a process group whose messages are announced, and answered, before they leave.

    `outgoing` and `incoming` are the working copies of `sends` and `recvs`. A message leaves when its receiver has said
    that it fits; both ends raise if it does not. What a rank awaits of one message never hangs on a later one, so the
    two ends may group their messages differently.
    """
    rank, host = group.rank(), torch.device("cpu")
    own = reporter.own
    data = [group.recv([flat.view(torch.uint8)], src, _DATA) for flat, src in incoming]
    announced = [_blank(host) for _ in recvs]
    announcements = [group.recv([note], src, _NOTICE) for note, (_, src) in zip(announced, recvs, strict=True)]
    answered = [_blank(host) for _ in sends]
    answers = [group.recv([note], dst, _ANSWER) for note, (_, dst) in zip(answered, sends, strict=True)]
    notices = [_note(_send(tensor, reporter.world_rank(dst)), host) for tensor, dst in sends]
    works = [group.send([note], dst, _NOTICE) for note, (_, dst) in zip(notices, sends, strict=True)]
    replies = [_note(_recv(out, reporter.world_rank(src)), host) for out, src in recvs]
    calls: dict[int, str] = {}
    for work, note, reply, (out, src) in zip(announcements, announced, replies, recvs, strict=True):
        wait(work)
        works.append(group.send([reply], src, _ANSWER))
        if _text(note) != _send(out, own):
            calls = calls or {rank: _recv(out, reporter.world_rank(src)), src: _text(note)}
    for work, note, (flat, dst), (tensor, _) in zip(answers, answered, outgoing, sends, strict=True):
        wait(work)
        if _text(note) != _recv(tensor, own):
            calls = calls or {rank: _send(tensor, reporter.world_rank(dst)), dst: _text(note)}
        if not calls:
            works.append(group.send([flat.view(torch.uint8)], dst, _DATA))
    if calls:
        raise reporter.mismatch("exchange", calls)
    for work in (*data, *works):
        wait(work)


def _send(tensor: Tensor, dst: int) -> str:
    return f"send(dst={dst}) of {describe(tensor)}"


def _recv(out: Tensor, src: int) -> str:
    return f"recv(src={src}) of {describe(out)}"
