"""Ranks train alone; an outer optimizer moves the common weights (DiLoCo, arXiv 2311.08105)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from murmura.algorithms.after_step import AfterStepImpl
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import at_least_one, is_real, take_compressor, yes_or_no
from murmura.algorithms.codec_thread import CodecThread
from murmura.algorithms.compressed import CompressedMean, Residual
from murmura.algorithms.means import compressed_mean
from murmura.algorithms.names import LOCAL_STEPS, register_algorithm
from murmura.algorithms.traffic import mean_bytes
from murmura.algorithms.weights import FlatWeights, as_real
from murmura.compressors import Compressor
from murmura.errors import ConfigError
from murmura.types import ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class DiLoCoAlgorithmImpl(AfterStepImpl):
    """The running state of `DiLoCoAlgorithm` for one model.

    θ are the common weights, the same bits on every rank, and x a rank's own: d = mean(θ - x), v ← μ v + d,
    θ ← θ - lr (d + μ v), x ← θ. Buffers are averaged plainly: momentum would carry a variance below zero.
    """

    interval: int
    outer_lr: float
    outer_momentum: float
    compressor: Compressor | None

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._codec = CodecThread()

    def use(self, weights: FlatWeights) -> None:
        self._flats = weights.allocate(self.process_group.allocate)
        counts = weights.num_parameter_elements
        self._theta = [flat[:count].clone() for flat, count in zip(self._flats, counts, strict=True)]
        self._velocity = [torch.zeros_like(each) for each in self._theta]
        self._means: list[CompressedMean] = []
        if self.compressor is not None and self.process_group.world_size > 1:
            self._means = [
                compressed_mean(self.process_group, as_real(each), self.compressor, self._codec) for each in self._theta
            ]

    def is_due(self, number: int) -> bool:
        return (number + 1) % self.interval == 0

    @torch.no_grad()
    def start_from_mean(self) -> None:
        shifts = [torch.zeros_like(flat) for flat in self._flats]
        for shift, theta in zip(shifts, self._theta, strict=True):
            mean = theta.clone()
            self.process_group.all_reduce(mean, ReduceOp.MEAN)
            shift[: theta.numel()] = mean - theta
            theta.copy_(mean)
        self._weights.add(shifts)  # what a rank has changed since it loaded is kept

    def communicate(self) -> None:
        self._weights.read(self._flats)
        changes = [flat[: theta.numel()] for flat, theta in zip(self._flats, self._theta, strict=True)]
        for change, theta in zip(changes, self._theta, strict=True):
            torch.sub(theta, change, out=change)
        self._average(changes)
        for change, theta, velocity in zip(changes, self._theta, self._velocity, strict=True):
            velocity.mul_(self.outer_momentum).add_(change)
            theta.sub_(change.add_(velocity, alpha=self.outer_momentum), alpha=self.outer_lr)
            change.copy_(theta)
        self._weights.write(self._flats)

    def _average(self, changes: Sequence[Tensor]) -> None:
        if not self._means:
            for flat in self._flats:
                self.process_group.all_reduce(flat, ReduceOp.MEAN)
            return
        for mean, change, flat in zip(self._means, changes, self._flats, strict=True):
            mean(as_real(change))
            buffers = flat[change.numel() :]  # whole values beside small changes: they would cost them their bits
            if buffers.numel():
                self.process_group.all_reduce(buffers, ReduceOp.MEAN)

    def parameters_added(self) -> None:
        residuals = self._residuals()
        super().parameters_added()
        for mean, layout in zip(self._means, self._layouts(), strict=True):
            mean.set_residuals(*layout, residuals)

    def _residuals(self) -> dict[str, Residual]:
        return {
            name: residual
            for mean, layout in zip(self._means, self._layouts(), strict=True)
            for name, residual in mean.residuals(*layout).items()
        }

    def _layouts(self) -> list[tuple[list[str], list[int]]]:
        """The parameters that each compressed mean is of, and how many real numbers each has."""
        parts = self._weights.by_name(self._flats)
        names_of = self._weights.parameters_of if self._means else []
        return [(names, [as_real(parts[name]).numel() for name in names]) for names in names_of]

    def close(self) -> None:
        self._codec.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "theta": self._by_name(self._theta),
            "velocity": self._by_name(self._velocity),
            "compressed": [mean.state_dict() for mean in self._means],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._is_restarted = False
        for own, saved in ((self._theta, state["theta"]), (self._velocity, state["velocity"])):
            flats = self._as_flats(own)
            self._weights.load_by_name(flats, saved)
            for each, flat in zip(own, flats, strict=True):
                each.copy_(flat[: each.numel()])
        if len(state["compressed"]) == len(self._means):
            for mean, saved in zip(self._means, state["compressed"], strict=True):
                mean.load_state_dict(saved)

    def _by_name(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        named = self._weights.by_name(self._as_flats(values))
        return {name: named[name] for names in self._weights.parameters_of for name in names}

    def _as_flats(self, values: Sequence[Tensor]) -> list[Tensor]:
        """`values`, which are of the parameters, at their place in flats that end with the buffers."""
        flats = [torch.zeros_like(flat) for flat in self._flats]
        for flat, each in zip(flats, values, strict=True):
            flat[: each.numel()] = each
        return flats


@register_algorithm("diloco", interval=LOCAL_STEPS)
@register_algorithm(
    "sparse_loco", interval=LOCAL_STEPS, outer_lr=1.0, outer_momentum=0.0, compressor="topk2bit(decay=0.95)"
)
@dataclass(frozen=True)
class DiLoCoAlgorithm(Algorithm):
    """Applies Nesterov momentum to the mean change of the weights after every `interval`-th round.

    `compressor` sends that change in fewer bytes. `average_moments` averages what the inner optimizers remember, such
    as Adam's moments, as well.
    """

    impl: ClassVar[type[AlgorithmImpl]] = DiLoCoAlgorithmImpl

    interval: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    compressor: Compressor | str | None = field(default=None, kw_only=True)
    average_moments: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        lr, momentum = self.outer_lr, self.outer_momentum
        at_least_one(interval=self.interval)
        yes_or_no(average_moments=self.average_moments)
        if not is_real(lr) or not lr > 0 or not is_real(momentum) or not 0 <= momentum < 1:
            raise ConfigError(
                f"outer_lr={lr!r} must be a number above 0, and outer_momentum={momentum!r} one from 0 up to below 1."
            )
        if self.compressor is not None:
            take_compressor(self, self.compressor)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        """With moments, those of Adam: two for each element, as they are."""
        moments = 2 * mean_bytes(parameters, num_ranks) if self.average_moments else 0
        return (mean_bytes(parameters, num_ranks, self.compressor) + moments) / self.interval

    @property
    def period(self) -> int:
        return self.interval
