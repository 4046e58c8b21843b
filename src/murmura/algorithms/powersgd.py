"""Gradients as products of two thin matrices (PowerSGD, arXiv 1905.13727)."""

from __future__ import annotations

import functools
import math
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters, Replica
from murmura.algorithms.checks import at_least_one, is_real, yes_or_no
from murmura.algorithms.compressed import wide
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.parameter_state import ParameterState
from murmura.algorithms.skipped_steps import gradients_are_gone
from murmura.algorithms.traffic import mean_bytes
from murmura.buckets import Bucket
from murmura.errors import ConfigError, UsageError
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class _Matrix(NamedTuple):
    """A gradient that is sent as a product: its parameter's name, itself as a matrix M, and Q of the round before."""

    name: str
    m: Tensor
    q: Tensor


class PowerSGDAlgorithmImpl(AlgorithmImpl):
    """The running state of `PowerSGDAlgorithm` for one model.

    Each rank adds what its last message lost to its gradient M (n x m). P = mean M Q, whose columns are made
    orthonormal; Q = mean Mᵀ P; all ranks apply P Qᵀ, and each keeps M - P Qᵀ for the next round. Q, made orthonormal,
    begins the next round: one step of the power iteration a round. It begins at random, alike on all ranks.
    """

    exchanges = Exchanges.GRADIENTS
    works_alone = False

    rank: int
    warm_start: bool
    error_feedback: bool
    min_compression_rate: float
    warmup_rounds: int
    seed: int

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._errors = ParameterState()
        self._factors = ParameterState()  # Q
        self._rounds_since_step = 0

    def setup(self, replica: Replica) -> None:
        self._replica = replica

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if self._replica.round < self.warmup_rounds:
            self.process_group.all_reduce(bucket.flat, ReduceOp.MEAN)
            return
        self._errors.keep()
        self._factors.keep()
        before = self._errors.flat(bucket, wide(bucket.flat.dtype)) if self.error_feedback else None
        gradient = bucket.flat.to(wide(bucket.flat.dtype), copy=True) if before is None else bucket.flat + before
        parts = bucket.views_of(gradient)
        found = {index: self._matrix(bucket.names[index], part) for index, part in enumerate(parts)}
        matrices = {index: each for index, each in found.items() if each is not None}
        others = {index: part for index, part in enumerate(parts) if index not in matrices}
        first = self._means([*(each.m @ each.q for each in matrices.values()), *others.values()])
        ps = [orthonormal(p) for p in first[: len(matrices)]]
        qs = self._means([each.m.mH @ p for each, p in zip(matrices.values(), ps, strict=True)])
        decoded = dict(zip(others, first[len(matrices) :], strict=True))
        decoded |= {index: p @ q.mH for index, p, q in zip(matrices, ps, qs, strict=True)}
        for index, view in enumerate(bucket.views):
            view.copy_(decoded[index].view(view.shape))
        for each, q in zip(matrices.values(), qs, strict=True):
            self._keep_factor(each, q)
        if before is not None:
            losses = {index: each.m - decoded[index] for index, each in matrices.items()}
            self._keep_errors(bucket, before, losses)

    def _matrix(self, name: str, gradient: Tensor) -> _Matrix | None:
        """`gradient` as a matrix, unless a product would not be small enough."""
        height, width = matrix_shape(gradient.shape)
        rank = min(self.rank, height, width)
        if self.min_compression_rate * rank * (height + width) >= height * width:
            return None
        q = self._factors.get(name) if self.warm_start else None
        if q is None:
            number = 0 if self.warm_start else self._replica.round
            random = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {number} {name}".encode()))
            q = torch.randn(width, rank, generator=random, dtype=torch.float64)
        return _Matrix(name, gradient.reshape(height, width), orthonormal(q.to(gradient)))

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean over the ranks of each of `tensors`, in one message."""
        if not tensors:
            return []
        flat = torch.cat([each.reshape(-1) for each in tensors])
        self.process_group.all_reduce(flat, ReduceOp.MEAN)
        parts = torch.split(flat, [each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]

    def _keep_factor(self, matrix: _Matrix, q: Tensor) -> None:
        """Begin the next round with `q`, but for columns that are zero, or not finite: they would stay so."""
        if self.warm_start:
            is_usable = q.isfinite().all() & (q != 0).any(0)
            self._factors.set(matrix.name, torch.where(is_usable, q, matrix.q))

    def _keep_errors(self, bucket: Bucket, before: Tensor, losses: Mapping[int, Tensor]) -> None:
        """Keep what each matrix lost, or, where an infinity or a NaN has come in, what had been lost before."""
        errors = torch.zeros_like(before)
        olds = bucket.views_of(before)
        for index, view in enumerate(bucket.views_of(errors)):
            if index in losses:
                loss = losses[index].view(view.shape)
                view.copy_(torch.where(loss.isfinite().all(), loss, olds[index]))
        self._errors.set_flat(bucket, errors)

    # Steps

    def after_backward(self) -> None:
        self._rounds_since_step += 1

    def before_step(self, optimizer: Optimizer) -> None:
        self._rounds_since_step = 0
        self._errors.forget_kept()
        self._factors.forget_kept()

    def before_forward(self) -> None:
        if self._rounds_since_step and gradients_are_gone(self._replica):
            self.skip_step()
            self._rounds_since_step = 0

    def skip_step(self) -> None:
        self._errors.restore()
        self._factors.restore()

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "rounds_since_step": self._rounds_since_step,
            "errors": self._errors.state_dict(),
            "factors": self._factors.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rounds_since_step = state["rounds_since_step"]
        self._errors.load_state_dict(state["errors"])
        self._factors.load_state_dict(state["factors"])


_LOADING = threading.Lock()


@functools.cache
def _load_solver(device: torch.device) -> None:
    """Let torch load its solver for `device`: it refuses the second of two threads that ask for it at once."""
    torch.linalg.qr(torch.ones(1, 1, device=device))


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of a space that holds `columns`."""
    if columns.is_cuda:
        with _LOADING:
            _load_solver(columns.device)
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The height and width of a parameter as a matrix: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


@register_algorithm("powersgd")
@dataclass(frozen=True)
class PowerSGDAlgorithm(Algorithm):
    """Sends the gradient of a matrix as two thin factors of `rank` columns, and averages them during backward.

    A matrix is sent whole where factors would not be smaller by `min_compression_rate`, and everything is in the first
    `warmup_rounds`. `warm_start` goes on from the last round's factor, instead of a random one; `error_feedback` adds
    what a message lost to the next gradient.
    """

    impl: ClassVar[type[AlgorithmImpl]] = PowerSGDAlgorithmImpl

    rank: int = 1
    warm_start: bool = field(default=True, kw_only=True)
    error_feedback: bool = field(default=True, kw_only=True)
    min_compression_rate: float = field(default=2.0, kw_only=True)
    warmup_rounds: int = field(default=0, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        at_least_one(rank=self.rank)
        yes_or_no(warm_start=self.warm_start, error_feedback=self.error_feedback)
        if not is_real(self.min_compression_rate) or self.min_compression_rate < 1:
            raise ConfigError(f"min_compression_rate={self.min_compression_rate!r} must be a number, at least 1.")
        for name in ("warmup_rounds", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a whole number, at least 0.")

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        """After the warm-up, in which it sends what `GradientAllReduceAlgorithm` does."""
        if isinstance(parameters, int):
            raise UsageError("what PowerSGD sends depends on the shapes of the parameters: give these.")
        return mean_bytes(sum(self._num_sent(shape) for shape in parameters), num_ranks)

    def _num_sent(self, shape: Sequence[int]) -> int:
        height, width = matrix_shape(shape)
        num_low_rank = min(self.rank, height, width) * (height + width)
        return num_low_rank if self.min_compression_rate * num_low_rank < height * width else height * width
