"""State of each parameter, by its name: it stays with the parameter, whichever bucket this travels in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from murmura.algorithms.checks import instances_of
from murmura.buckets import Bucket
from murmura.errors import UsageError


class ParameterState:
    """A tensor for each parameter, which an algorithm replaces and never writes into.

    `flat` and `set_flat` read and replace the tensors of a bucket's parameters as one flat tensor. A round whose step
    is skipped can be undone: call `keep` before the round, then `restore`, or `forget_kept` if the step is taken.
    `restore_those_of` undoes it for some parameters only, those that no rank used.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] | None = None
        self._flats: dict[tuple[str, ...], Tensor] = {}  # those that all tensors of a bucket are parts of

    def get(self, name: str) -> Tensor | None:
        """The tensor of a parameter; None if there is none yet."""
        tensor = self._tensors.get(name)
        if tensor is not None:
            _in_use(tensor)
        return tensor

    def set(self, name: str, tensor: Tensor) -> None:
        """Replace the tensor of a parameter."""
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UsageError(f"the state of name={name!r} cannot be tensor={tensor!r}: give a string and a tensor.")
        self._tensors[name] = tensor
        self._flats = {}

    def flat(self, bucket: Bucket, dtype: torch.dtype | None = None) -> Tensor:
        """The tensors of the bucket's parameters, concatenated; zeros for a parameter that has none yet.

        In `dtype`, or, if that is None, in the bucket's.
        """
        instances_of(Bucket, bucket=bucket)
        names = tuple(bucket.names)
        if names not in self._flats:
            flat = torch.zeros_like(bucket.flat, dtype=dtype)
            for name, part in zip(names, torch.split(flat, bucket.numels), strict=True):
                if name in self._tensors:
                    tensor = self._tensors[name]
                    if tensor.numel() != part.numel():
                        raise UsageError(
                            f"the state of {name!r} has {tensor.numel()} elements and the parameter {part.numel()}: "
                            "flat() needs as many. Read it with get()."
                        )
                    part.copy_(tensor.reshape(-1))
                    _in_use(tensor)
            self.set_flat(bucket, flat)
        return self._flats[names]

    def set_flat(self, bucket: Bucket, flat: Tensor) -> None:
        """Replace the tensors of the bucket's parameters by the parts of `flat`."""
        instances_of(Bucket, bucket=bucket)
        if not isinstance(flat, Tensor) or flat.shape != bucket.flat.shape:
            raise UsageError(f"flat={flat!r}: give a tensor of {bucket.flat.numel()} elements, those of the bucket.")
        names = tuple(bucket.names)
        if names not in self._flats:  # parameters that were elsewhere have moved
            self._flats = {others: each for others, each in self._flats.items() if not set(others) & set(names)}
        self._flats[names] = flat
        self._tensors.update(zip(names, torch.split(flat, bucket.numels), strict=True))

    def keep(self) -> None:
        """Keep the tensors as they are now, unless older ones are kept."""
        if self._kept is None:
            self._kept = dict(self._tensors)

    def forget_kept(self) -> None:
        """Drop what was kept: what followed `keep` has been applied."""
        self._kept = None

    def restore(self) -> None:
        """Take back the tensors that were kept: what followed `keep` was not applied."""
        if self._kept is not None:
            self._tensors, self._kept, self._flats = self._kept, None, {}

    def restore_those_of(self, names: Collection[str]) -> None:
        """Take back the kept tensors of the parameters `names`; the others stay as they are."""
        if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(e, str) for e in names):
            raise UsageError(f"names={names!r}: give the names of parameters, as a list or a set.")
        if self._kept is None:
            return
        for name in names:
            self._tensors.pop(name, None)
            if name in self._kept:
                self._tensors[name] = self._kept[name]
        self._flats = {others: each for others, each in self._flats.items() if not set(others) & set(names)}

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": _copies(self._tensors), "kept": None if self._kept is None else _copies(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tensors = _copies(state["tensors"])
        self._kept = None if state["kept"] is None else _copies(state["kept"])
        self._flats = {}


def _in_use(tensor: Tensor) -> None:
    """The current stream reads `tensor`, which may have been loaded on another and be dropped before it has done so."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
