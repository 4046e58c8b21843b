"""The weights of a replica, side by side: what algorithms that exchange weights work on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from murmura.algorithms.base import Replica
from murmura.errors import ConfigError
from murmura.transports.base import Transport


class _Kind(NamedTuple):
    """The weights of one dtype and device."""

    dtype: torch.dtype
    device: torch.device
    members: list[int]  # indices into the list of weights: parameters, then buffers
    numel: int
    num_parameter_elements: int  # these come first


class FlatWeights:
    """Moves the weights of `replica` into flat tensors and back; one flat for each dtype and device.

    The weights are the parameters that were trainable when this was made, or all, and the buffers that have a mean. The
    replica's own tensors stay where they are.
    """

    def __init__(self, replica: Replica, *, with_frozen: bool = False) -> None:
        self._replica = replica
        self._parameters: list[Tensor] = [p for p in replica.parameters if p.requires_grad or with_frozen]
        weights = self._weights()
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, weight in enumerate(weights):
            by_kind.setdefault((weight.dtype, weight.device), []).append(index)
        self._kinds = [
            _Kind(
                dtype,
                device,
                members,
                sum(weights[each].numel() for each in members),
                sum(weights[each].numel() for each in members if each < len(self._parameters)),
            )
            for (dtype, device), members in by_kind.items()
        ]

    @property
    def num_parameter_elements(self) -> list[int]:
        """How many elements of each flat are parameters; the buffers come behind them."""
        return [kind.num_parameter_elements for kind in self._kinds]

    def allocate(self, transport: Transport) -> list[Tensor]:
        """Flats filled with the weights as they are, in memory on which `transport` need not copy."""
        flats = [transport.allocate(kind.numel, kind.dtype, kind.device) for kind in self._kinds]
        self.read(flats)
        return flats

    @torch.no_grad()
    def read(self, flats: Sequence[Tensor]) -> None:
        """Overwrite `flats` with the weights."""
        for part, weight in self._pairs(flats):
            part.copy_(weight)

    @torch.no_grad()
    def write(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the weights, in place, with `flats`."""
        for part, weight in self._pairs(flats):
            weight.copy_(part)

    @torch.no_grad()
    def renew(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the parameters with `flats`, but add to the buffers what stands there for them, in place."""
        for part, weight in self._pairs(flats):
            if isinstance(weight, nn.Parameter):
                weight.copy_(part)
            else:
                weight.add_(part)

    @torch.no_grad()
    def add(self, flats: Sequence[Tensor]) -> None:
        """Add `flats` to the weights, in place."""
        for part, weight in self._pairs(flats):
            weight.add_(part)

    def _weights(self) -> list[Tensor]:
        # A module may put another tensor in the place of a buffer, so these are looked up each time.
        return [*self._parameters, *(each for each in self._replica.buffers if _has_mean(each))]

    def _pairs(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        weights = self._weights()
        pairs = []
        for flat, kind in zip(flats, self._kinds, strict=True):
            members = [weights[each] for each in kind.members]
            parts = torch.split(flat, [weight.numel() for weight in members])
            pairs += [(part.view(weight.shape), weight) for part, weight in zip(parts, members, strict=True)]
        return pairs


def as_real(flat: Tensor) -> Tensor:
    """`flat` itself, or the parts of complex numbers as a flat of twice the length: what compressors take."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def check_same_lengths(saved: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Refuse to load flats of another model."""
    if [each.numel() for each in saved] != [each.numel() for each in own]:
        raise ConfigError(
            f"this state holds flats of {[each.numel() for each in saved]} elements, and the model here makes "
            f"{[each.numel() for each in own]}: it was saved for another model, or with other parameters trainable."
        )
