"""The weights of a replica in flat tensors, for algorithms that exchange weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmura.algorithms.base import Replica
from murmura.algorithms.checks import NOT_SAVED, check_replica, check_saved_tensor, instances_of
from murmura.buckets.flat import FlatTensors
from murmura.compressors.base import PIECE_ELEMENTS
from murmura.errors import ConfigError


class Piece(NamedTuple):
    """The elements from `start` to before `stop` of the parameter or buffer `name`."""

    name: str
    start: int
    stop: int


class FlatWeights(FlatTensors):
    """Moves the weights of `replica` into flat tensors and back.

    The weights are the parameters that took part when this was made, or all, and the buffers that have a mean. The
    replica's own tensors stay where they are.
    """

    def __init__(self, replica: Replica, *, with_frozen: bool = False) -> None:
        check_replica(replica)
        self._replica = replica
        chosen = {
            name: parameter
            for name, parameter in zip(replica.names, replica.parameters, strict=True)
            if with_frozen or name in replica.trained
        }
        self._names = list(chosen)
        self._parameters: list[Tensor] = list(chosen.values())
        super().__init__(self._tensors())

    @property
    def num_parameter_elements(self) -> list[int]:
        """How many elements of each flat are parameters; the buffers come behind them."""
        count = len(self._parameters)
        return [sum(self._parameters[each].numel() for each in group.members if each < count) for group in self.groups]

    @property
    def parameters_of(self) -> list[list[str]]:
        """The names of the parameters in each flat, in their order there."""
        count = len(self._parameters)
        return [[self._names[each] for each in group.members if each < count] for group in self.groups]

    def pieces(self, number: int, start: int, stop: int) -> list[Piece]:
        """What lies between `start` and `stop` in flat `number`."""
        names, tensors = self._all_names(), self._tensors()
        pieces, offset = [], 0
        for each in self.groups[number].members:
            numel = tensors[each].numel()
            first, last = max(start - offset, 0), min(stop - offset, numel)
            if first < last:
                pieces.append(Piece(names[each], first, last))
            offset += numel
        return pieces

    @torch.no_grad()
    def read_changes(self, pieces: Sequence[Piece], since: Tensor, out: Tensor) -> None:
        """Overwrite `out` with `since` - x, end to end; behind the end of `since` with x."""
        parts = self._parts_of(pieces)
        if not out.is_cpu:  # two kernels, however many parts
            torch.cat(parts, out=out)
            torch.sub(since, out[: since.numel()], out=out[: since.numel()])
            return
        start = 0
        for part in parts:
            stop = start + part.numel()
            if start < since.numel():
                torch.sub(since[start:stop], part, out=out[start:stop])
            else:
                out[start:stop] = part
            start = stop

    @torch.no_grad()
    def mix_pieces(self, pieces: Sequence[Piece], values: Tensor, alpha: float) -> None:
        """Let `pieces` become alpha x + (1 - alpha) `values`, which lie end to end."""
        tensors = self._by_name()
        kept = [tensors[name].reshape(-1) for name, _, _ in pieces]  # of a tensor that is not contiguous, a copy
        parts = [each[start:stop] for each, (_, start, stop) in zip(kept, pieces, strict=True)]
        news = list(torch.split(values.to(parts[0].device), [part.numel() for part in parts]))
        if not alpha:
            torch._foreach_copy_(parts, news)
        elif parts[0].is_cpu:
            for part, new in zip(parts, news, strict=True):
                for x, value in zip(*(torch.split(each, PIECE_ELEMENTS) for each in (part, new)), strict=True):
                    x.mul_(alpha).add_(value * (1 - alpha))
        else:
            torch._foreach_mul_(parts, alpha)
            torch._foreach_add_(parts, torch._foreach_mul(news, 1 - alpha))
        for (name, _, _), each in zip(pieces, kept, strict=True):
            if not tensors[name].is_contiguous():
                tensors[name].copy_(each.view(tensors[name].shape))

    def _parts_of(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """The values of `pieces`, each flat: views, but of a tensor that is not contiguous a copy."""
        tensors = self._by_name()
        return [tensors[name].reshape(-1)[start:stop] for name, start, stop in pieces]

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """A copy of each parameter's and buffer's part of `flats`."""
        return {name: part.clone() for name, part in self._parts(flats).items()}

    def check_by_name(self, saved: Mapping[str, Tensor]) -> None:
        """Raise `ConfigError` if `saved` holds what the model has not, or another number of elements of it."""
        tensors = self._with_others()
        for name, value in saved.items():
            check_saved_tensor(name, value)
            if not self._is_known(name) or (name in tensors and tensors[name].numel() != value.numel()):
                raise of_another_model(name, value.numel())

    def load_by_name(self, flats: Sequence[Tensor], saved: Mapping[str, Tensor]) -> None:
        """Overwrite the parts of `flats` that `saved` names; the others stay as they are."""
        self.check_by_name(saved)
        parts = self._parts(flats)
        for name, value in saved.items():
            if name in parts:
                parts[name].copy_(value)

    def check_pieces(self, pieces: Sequence[Sequence[Any]], values: Tensor) -> None:
        """Raise `ConfigError` unless saved `pieces` are of the model, and `values` are theirs, end to end."""
        others, numel = self._with_others(), 0
        for name, start, stop in pieces:
            check_saved_tensor(name, values)
            if not self._is_known(name) or (name in others and stop > others[name].numel()):
                raise of_another_model(name, stop)
            numel += stop - start
        if numel != values.numel():
            raise ConfigError(f"this state holds {values.numel()} elements for pieces of {numel}. {NOT_SAVED}")

    def held_pieces(self, pieces: Sequence[Piece], values: Tensor) -> tuple[list[Piece], Tensor]:
        """Those of the saved `pieces` that are weights here, and a copy of their part of `values`."""
        tensors = self._by_name()
        parts = torch.split(values, [stop - start for _, start, stop in pieces])
        held = [(piece, part) for piece, part in zip(pieces, parts, strict=True) if piece.name in tensors]
        return [piece for piece, _ in held], torch.cat([part for _, part in held]) if held else values.new_empty(0)

    def _is_known(self, name: str) -> bool:
        """Whether the model has it; it may be no weight."""
        return name in self._replica.names or name in self._replica.buffer_names

    def _with_others(self) -> dict[str, Tensor]:
        """The weights, and the parameters that do not take part."""
        return {**dict(zip(self._replica.names, self._replica.parameters, strict=True)), **self._by_name()}

    def _parts(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: part.view(-1) for name, part in zip(self._all_names(), self.parts(flats), strict=True)}

    def _by_name(self) -> dict[str, Tensor]:
        return dict(zip(self._all_names(), self._tensors(), strict=True))

    def _all_names(self) -> list[str]:
        """The names of `_tensors`."""
        buffers = zip(self._replica.buffer_names, self._replica.buffers, strict=False)
        return [*self._names, *(name for name, each in buffers if _has_mean(each))]

    def _tensors(self) -> list[Tensor]:
        # A module may put another tensor in the place of a buffer, so these are looked up each time.
        return [*self._parameters, *(each for each in self._replica.buffers if _has_mean(each))]


def as_real(flat: Tensor) -> Tensor:
    """`flat` itself, or the parts of complex numbers as a flat of twice the length: what compressors take."""
    instances_of(Tensor, flat=flat)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def of_another_model(name: str, numel: int) -> ConfigError:
    """The error that a state holds `numel` elements of a parameter that has another number of them here, or none."""
    return ConfigError(
        f"this state holds {numel} elements of {name!r}, which the model here does not have: it was saved for another "
        "model."
    )


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
