"""Digests of state dicts: what is equal on all ranks is written to a checkpoint once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def digest(tree: Any) -> str:
    """Return a digest of nested dicts and lists, equal for equal values; that of an incomparable value is unique."""
    found = hashlib.sha256()  # as fast as others: most processors have instructions for it
    for piece in _pieces(tree):
        found.update(piece)
    return found.hexdigest()


def num_bytes(tree: Any) -> int:
    """Return about how many bytes the tensors in `tree` will take in a file."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(num_bytes, tree.values()))
    if isinstance(tree, (list, tuple)):
        return sum(map(num_bytes, tree))
    return 0


def _pieces(tree: Any) -> Iterator[Any]:
    match tree:
        case Tensor():
            yield f"{tree.dtype} {tuple(tree.shape)} {tree.layout}".encode()
            if tree.layout is torch.strided and not tree.is_quantized:
                yield tree.detach().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            else:
                yield f"{id(tree)}".encode()
        case Mapping():
            yield f"{len(tree)} entries".encode()
            for key, value in tree.items():
                yield repr(key).encode()
                yield from _pieces(value)
        case list() | tuple():
            yield f"{len(tree)} items".encode()
            for value in tree:
                yield from _pieces(value)
        case _:
            yield f"{type(tree).__name__} {tree!r}".encode()
