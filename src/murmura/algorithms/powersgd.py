"""Gradients as products of two thin matrices (PowerSGD, arXiv 1905.13727)."""

from __future__ import annotations

import functools
import math
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import (
    at_least,
    at_least_one,
    check_fields,
    check_saved_tensor,
    is_real,
    yes_or_no,
)
from murmura.algorithms.compressed import wide
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.parameter_state import ParameterState
from murmura.algorithms.skipped_steps import SkippedStepsImpl
from murmura.algorithms.traffic import mean_bytes, num_elements
from murmura.algorithms.weights import of_another_model
from murmura.buckets import Bucket
from murmura.errors import ConfigError, UsageError
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


MESSAGE_BYTES = 64 * 1024
"""First factors are collected over buckets until they take this many bytes: a shorter message takes as much time."""


class _Matrix(NamedTuple):
    """A gradient that is sent as a product: its parameter's name, itself as a matrix M, and Q of the round before."""

    name: str
    m: Tensor
    q: Tensor


@dataclass
class _Pending:
    """A bucket whose gradients are under way; indices are those of its parameters."""

    bucket: Bucket
    before: Tensor | None  # what the last messages lost, if that is fed back
    gradient: Tensor  # with it; in the end what these messages lose
    parts: list[Tensor]  # of `gradient`, one for each parameter
    matrices: dict[int, _Matrix]
    firsts: list[Tensor]  # what is averaged first: P of each matrix, then the gradients that are sent as they are
    is_finite: list[Tensor] = field(default_factory=list)  # of each P
    seconds: list[Tensor] = field(default_factory=list)  # what is averaged then: Q of each matrix

    @property
    def others(self) -> list[int]:
        return [index for index in range(len(self.parts)) if index not in self.matrices]


class PowerSGDAlgorithmImpl(SkippedStepsImpl):
    """The running state of `PowerSGDAlgorithm` for one model.

    Each rank adds what its last message lost to its gradient M (n x m). P = mean M Q, whose columns are made
    orthonormal; Q = mean Mᵀ P; all ranks apply P Qᵀ, and each keeps M - P Qᵀ for the next round. Q, made orthonormal,
    begins the next round: one step of the power iteration a round. It begins at random, alike on all ranks.

    A message holds P of some buckets and Q of those before. It is sent during backward as soon as its P, and what is
    not factored, take `MESSAGE_BYTES`; the last P and Q go after it. So both factors of a model overlap with backward
    but for the last message's, and those of one with fewer bytes of P do not.
    """

    exchanges = Exchanges.GRADIENTS
    works_alone = False
    weighs_first = True

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
        self._waiting: list[_Pending] = []  # for their first factors to be sent
        self._halfway: list[_Pending] = []  # for their second ones
        self._kept_flats: dict[tuple[str, ...], Tensor] = {}  # errors that a skipped step would bring back
        self._free_flats: dict[tuple[str, ...], Tensor] = {}  # memory for new ones: fresh memory is slow

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if self._replica.round < self.warmup_rounds:
            self.process_group.all_reduce(bucket.flat, ReduceOp.MEAN)
            return
        if bucket.index == 0:
            self._waiting, self._halfway = [], []
            self._errors.keep()
            self._factors.keep()
        self._waiting.append(self._begin(bucket))
        is_last = bucket.index == len(self._replica.buckets) - 1
        num_bytes = sum(each.nbytes for pending in self._waiting for each in pending.firsts)
        if is_last or num_bytes >= MESSAGE_BYTES:  # alike on all ranks
            self._exchange()
        if is_last:
            self._exchange()

    def _begin(self, bucket: Bucket) -> _Pending:
        dtype, before = wide(bucket.flat.dtype), None
        if self.error_feedback:
            before = self._errors.flat(bucket, dtype)
            gradient = self._free_flats.pop(tuple(bucket.names), None)
            if gradient is None:
                gradient = torch.empty_like(bucket.flat, dtype=dtype)
            torch.add(bucket.flat, before, out=gradient)
        else:
            gradient = bucket.flat.to(dtype)
        parts = bucket.views_of(gradient)
        found = {index: self._matrix(bucket.names[index], part) for index, part in enumerate(parts)}
        matrices = {index: each for index, each in found.items() if each is not None}
        pending = _Pending(bucket, before, gradient, parts, matrices, [each.m @ each.q for each in matrices.values()])
        pending.firsts += [parts[index] for index in pending.others]
        return pending

    def _matrix(self, name: str, gradient: Tensor) -> _Matrix | None:
        """`gradient` as a matrix, or None if it is sent whole."""
        height, width = matrix_shape(gradient.shape)
        rank = factor_rank(height, width, self.rank, self.min_compression_rate)
        if rank == 0:
            return None
        q = self._factors.get(name) if self.warm_start else None
        if q is None:
            number = 0 if self.warm_start else self._replica.round
            random = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {number} {name}".encode()))
            q = torch.randn(width, rank, generator=random, dtype=torch.float64)
        return _Matrix(name, gradient.reshape(height, width), orthonormal(q.to(gradient)))

    def _exchange(self) -> None:
        """Send the first factors of the buckets that wait, and the second ones of those whose first have been sent."""
        first, second = self._waiting, self._halfway
        tensors = [each for pending in first for each in pending.firsts]
        means = iter(self._means([*tensors, *(each for pending in second for each in pending.seconds)]))
        for pending in first:
            self._take_first(pending, [next(means) for _ in pending.firsts])
        for pending in second:
            self._take_second(pending, [next(means) for _ in pending.seconds])
        self._waiting, self._halfway = [], first

    def _means(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean over the ranks of each of `tensors`, in one message for each dtype and device."""
        found: dict[int, Tensor] = {}
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, each in enumerate(tensors):
            groups.setdefault((each.dtype, each.device), []).append(index)
        for members in groups.values():
            flat = torch.cat([tensors[index].reshape(-1) for index in members])
            self.process_group.all_reduce(flat, ReduceOp.MEAN)
            parts = torch.split(flat, [tensors[index].numel() for index in members])
            found |= {index: part.view(tensors[index].shape) for index, part in zip(members, parts, strict=True)}
        return [found[index] for index in range(len(tensors))]

    def _take_first(self, pending: _Pending, means: Sequence[Tensor]) -> None:
        """Apply what was sent as it is, and make the second factors of the others."""
        matrices, views = list(pending.matrices.values()), pending.bucket.views
        firsts = means[: len(matrices)]
        for index, mean in zip(pending.others, means[len(matrices) :], strict=True):
            views[index].copy_(mean.view(views[index].shape))
        pending.is_finite = [each.isfinite().all() for each in firsts]
        pending.firsts = [orthonormal(each) for each in firsts]
        pending.seconds = [each.m.mH @ p for each, p in zip(matrices, pending.firsts, strict=True)]

    def _take_second(self, pending: _Pending, means: Sequence[Tensor]) -> None:
        """Apply the products, and keep what they lose."""
        views = pending.bucket.views
        for (index, matrix), p, q in zip(pending.matrices.items(), pending.firsts, means, strict=True):
            _write_product(p, q.mH, views[index])
            if self.warm_start:
                self._keep_factor(matrix, q)
        if pending.before is not None:
            self._keep_errors(pending, pending.before, means)

    def _keep_factor(self, matrix: _Matrix, q: Tensor) -> None:
        """Begin the next round with `q`, but for columns that are zero, or not finite: they would stay so."""
        is_usable = q.isfinite().all() & (q != 0).any(0)
        self._factors.set(matrix.name, torch.where(is_usable, q, matrix.q))

    def _keep_errors(self, pending: _Pending, before: Tensor, seconds: Sequence[Tensor]) -> None:
        """Keep what each matrix lost, or, where an infinity or a NaN has come in, what had been lost before.

        One in M is one in M Q, and so in the mean over the ranks.
        """
        bucket, olds = pending.bucket, pending.bucket.views_of(before)
        for index in pending.others:
            pending.parts[index].zero_()
        products = zip(pending.matrices.items(), pending.firsts, seconds, pending.is_finite, strict=True)
        for (index, matrix), p, q, is_finite in products:
            part = pending.parts[index]
            lost = matrix.m.addmm_(p, q.mH, alpha=-1).view(part.shape)
            if lost.data_ptr() != part.data_ptr():  # the parameter's memory is in another order
                part.copy_(lost)
            keeps = is_finite & q.isfinite().all()
            if part.is_cuda:  # where the host must not wait
                part.copy_(torch.where(keeps, part, olds[index]))
            elif not keeps:
                part.copy_(olds[index])
        self._errors.set_flat(bucket, pending.gradient)
        dropped = self._free_flats if self._rounds_since_step else self._kept_flats
        dropped[tuple(bucket.names)] = before

    # Steps

    def parameters_unused(self, names: Sequence[str]) -> None:
        self._errors.restore_those_of(names)
        self._factors.restore_those_of(names)
        unused = set(names)  # whose errors are in these flats again
        self._kept_flats = {others: each for others, each in self._kept_flats.items() if unused.isdisjoint(others)}

    def round_is_over(self) -> None:
        super().round_is_over()
        self._errors.forget_kept()
        self._factors.forget_kept()
        self._free_flats |= self._kept_flats
        self._kept_flats = {}

    def skip_step(self) -> None:
        self._errors.restore()
        self._factors.restore()
        self._kept_flats = {}  # they count again

    def before_replan(self, buckets: Sequence[Bucket]) -> None:
        self._free_flats, self._kept_flats = {}, {}

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "rounds_since_step": self._rounds_since_step,
            "errors": self._errors.state_dict(),
            "factors": self._factors.state_dict(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_fields(state, rounds_since_step=int, errors=Mapping, factors=Mapping)
        parameters = zip(self._replica.names, self._replica.parameters, strict=True)
        shapes = {name: matrix_shape(parameter.shape) for name, parameter in parameters}
        for name, error in _all_tensors(state["errors"]):
            if name not in shapes or list(error.shape) != [math.prod(shapes[name])]:
                raise of_another_model(name, error.numel())
            if not self.error_feedback and error.any():
                raise ConfigError(
                    f"this state holds what messages lost of {name!r}, which error_feedback=False would drop. Go on "
                    "with error_feedback=True, or leave the algorithm's state out."
                )
        for name, factor in _all_tensors(state["factors"]):
            if name not in shapes or list(factor.shape[:1]) != [shapes[name][1]]:
                raise of_another_model(name, factor.numel())
            expected = [shapes[name][1], min(self.rank, *shapes[name])]
            if self.warm_start and list(factor.shape) != expected:
                raise ConfigError(
                    f"this state holds a factor of shape {list(factor.shape)} for {name!r}, and here it is {expected}: "
                    "it was saved with another rank. Go on with the same, or leave the algorithm's state out."
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rounds_since_step = state["rounds_since_step"]
        self._errors.load_state_dict(state["errors"])
        self._free_flats, self._kept_flats = {}, {}
        self._factors.load_state_dict(state["factors"])


def _all_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What the state of a `ParameterState` holds, with the names of the parameters."""
    check_fields(state, "the state of parameters", tensors=Mapping, kept=(Mapping, NoneType))
    for name, tensor in (*state["tensors"].items(), *(state["kept"] or {}).items()):
        check_saved_tensor(name, tensor)
        yield name, tensor


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


def _write_product(p: Tensor, q: Tensor, view: Tensor) -> None:
    """Overwrite `view` with P Qᵀ."""
    height, width = p.shape[0], q.shape[1]
    if view.is_contiguous() and view.dtype == p.dtype:
        torch.mm(p, q, out=view.view(height, width))
    else:
        view.copy_((p @ q).view(view.shape))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The height and width of a parameter as a matrix: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def factor_rank(height: int, width: int, rank: int, min_compression_rate: float) -> int:
    """How many columns the factors of a matrix have; 0 if they would not be small enough, and it is sent whole."""
    rank = min(rank, height, width)
    return rank if min_compression_rate * rank * (height + width) < height * width else 0


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
        at_least(0, warmup_rounds=self.warmup_rounds, seed=self.seed)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        """After the warm-up, in which it sends what `GradientAllReduceAlgorithm` does."""
        if isinstance(parameters, int):
            raise UsageError(
                f"parameters={parameters!r}: what PowerSGD sends depends on the shapes of the parameters: give these."
            )
        num_elements(parameters)  # refuses what is no shape
        return mean_bytes(sum(self._num_sent(shape) for shape in parameters), num_ranks)

    def _num_sent(self, shape: Sequence[int]) -> int:
        height, width = matrix_shape(shape)
        rank = factor_rank(height, width, self.rank, self.min_compression_rate)
        return rank * (height + width) if rank else height * width
