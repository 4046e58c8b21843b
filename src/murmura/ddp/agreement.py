"""Do the replicas agree: on what the model is, and on what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.errors import CollectiveMismatch, ReplicaDivergence
from murmura.transports.base import Transport

_MODEL, _VALUES = range(2)
_SUBJECTS = ("what the model is", "what its parameters hold")


def check_same_model(transport: Transport, lines: Sequence[str]) -> None:
    """Raise `ReplicaDivergence` on every rank unless all ranks describe their model by the same `lines`."""
    if len(set(_digests(transport, _MODEL, "\n".join(lines).encode()))) == 1:
        return
    texts = [bytes(text.tolist()).decode().split("\n") for text in _gather(transport, "\n".join(lines).encode())]
    longest = max(map(len, texts))
    padded = [text + ["(nothing)"] * (longest - len(text)) for text in texts]
    at = next(index for index in range(longest) if len({text[index] for text in padded}) > 1)
    rows = "\n".join(f"  rank {rank}: {text[at]}" for rank, text in enumerate(padded))
    raise ReplicaDivergence(
        f"the ranks wrap different models; the first difference is entry {at} of parameters and buffers:\n{rows}\n"
        "Build the same model on every rank before wrapping it."
    )


def check_same_values(transport: Transport, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise `ReplicaDivergence`, naming the first tensor that differs and its values, unless all hold the same bits."""
    whole = hashlib.blake2b(digest_size=8)
    parts: list[bytes] = []
    for tensor in tensors:
        part = hashlib.blake2b(_raw(tensor), digest_size=8).digest()
        parts.append(part)
        whole.update(part)
    if len(set(_digests(transport, _VALUES, whole.digest()))) == 1:
        return
    every = [bytes(each.tolist()) for each in _gather(transport, b"".join(parts))]
    at = next(index for index in range(len(parts)) if len({each[8 * index : 8 * index + 8] for each in every}) > 1)
    held = transport.all_gather(tensors[at].detach().cpu().contiguous().reshape(-1))
    assert isinstance(held, list)
    raw = [each.view(torch.uint8).view(each.numel(), -1) for each in held]
    differs = torch.zeros(held[0].numel(), dtype=torch.bool)
    for other in raw[1:]:
        differs |= (other != raw[0]).any(dim=1)
    element = int(differs.nonzero()[0])
    values = "\n".join(f"  rank {rank}: {each[element].item()!r}" for rank, each in enumerate(held))
    raise ReplicaDivergence(
        f"the replicas have drifted apart: {names[at]!r} is the first that differs, in {int(differs.sum())} of "
        f"{differs.numel()} elements; element {element} is\n{values}\n"
        "Did a rank step, load or change its weights on its own? ddp.broadcast_parameters(0) brings them together."
    )


def _raw(tensor: Tensor) -> Any:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def _digests(transport: Transport, subject: int, data: bytes) -> list[int]:
    """The digests of what every rank holds; all ranks must compare the same `subject`, an index into _SUBJECTS."""
    number = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
    gathered = transport.all_gather(torch.tensor([subject, number]))
    assert isinstance(gathered, list)
    ranks = transport.world_ranks
    calls = {ranks[index]: f"a comparison of {_SUBJECTS[int(each[0])]}" for index, each in enumerate(gathered)}
    if len(set(calls.values())) > 1:
        rows = "\n".join(f"  rank {rank}: {call}" for rank, call in calls.items())
        raise CollectiveMismatch(
            f"the ranks of a model are not at the same place:\n{rows}\n"
            "Every rank must wrap, thaw and verify at the same round.",
            calls,
        )
    return [int(each[1]) for each in gathered]


def _gather(transport: Transport, data: bytes) -> list[Tensor]:
    gathered = transport.all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert isinstance(gathered, list)
    return gathered
