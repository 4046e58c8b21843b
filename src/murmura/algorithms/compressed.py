"""Means of compressed values: the encoders, and the residuals (what compression lost) that they carry over."""

from __future__ import annotations

import itertools
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmura.algorithms.checks import NOT_SAVED, check_fields, check_saved_tensor
from murmura.compressors import Compressor
from murmura.errors import ConfigError, UsageError
from murmura.transports.base import Transport


class Residual(NamedTuple):
    """What compression lost of one parameter: on this rank alone, and in the means, which are equal on all ranks."""

    own: Tensor
    mean: Tensor


class CompressedMean(ABC):
    """Averages flat tensors like `like` over the ranks, one after another; every rank gets the same bits.

    This rank's values are encoded as consecutive streams of `lengths` elements. If this rank also encodes a mean for
    the others, that of the elements `mean_chunk`, it is one more stream. Every stream has an encoder of its own, since
    a residual belongs to one stream. `shares[r]` is the weight of rank r; without `average` the result is the sum.
    """

    def __init__(
        self,
        transport: Transport,
        like: Tensor,
        compressor: Compressor,
        lengths: Sequence[int],
        mean_chunk: slice | None = None,
        *,
        shares: Sequence[int] | None = None,
        average: bool = True,
    ) -> None:
        self._transport = transport
        self._like = like.new_zeros(1).expand(like.numel())
        self._lengths = list(lengths)
        self._encoders = [compressor.for_bucket() for _ in lengths]
        self._mean_chunk = mean_chunk
        self._mean_encoder = compressor.for_bucket()
        self._kept: list[Tensor | None] | None = None
        self._shares = [1] * transport.world_size if shares is None else list(shares)
        self._divisor = sum(self._shares) if average else 1
        self._carries_state = carries_state(compressor)

    @abstractmethod
    def __call__(self, flat: Tensor) -> None:
        """Overwrite `flat` with the mean."""

    def _check(self, flat: Tensor) -> None:
        """Raise `UsageError` unless `flat` is such a tensor as this was made for."""
        like = self._like
        if (
            not isinstance(flat, Tensor)
            or flat.shape != like.shape
            or flat.dtype != like.dtype
            or flat.device != like.device
        ):
            told = f"{list(flat.shape)} of {flat.dtype} on {flat.device}" if isinstance(flat, Tensor) else repr(flat)
            raise UsageError(
                f"flat={told}: this mean was made for {like.numel()} elements of {like.dtype} on {like.device}, in one "
                "dimension."
            )

    @property
    def _all_encoders(self) -> list[Compressor]:
        return [*self._encoders, self._mean_encoder]

    # Steps that are skipped

    def keep_residuals(self) -> None:
        """Keep the present residuals, unless older ones are kept: the step that uses the next means may be skipped."""
        if self._carries_state and self._kept is None:
            self._kept = [encoder.lend_residual() for encoder in self._all_encoders]

    @property
    def has_kept(self) -> bool:
        """Whether earlier residuals are kept."""
        return self._kept is not None

    def forget_kept(self) -> None:
        """Drop what was kept: the means have been applied."""
        self._kept = None

    def restore_kept(self) -> None:
        """Take back the residuals that were kept: the means since then were not applied."""
        if self._kept is not None:
            for encoder, residual in zip(self._all_encoders, self._kept, strict=True):
                encoder.set_residual(residual)
            self._kept = None

    def restore_kept_of(self, unused: Collection[str], names: Sequence[str], numels: Sequence[int]) -> None:
        """Take back what was kept for the parameters `unused`, whose means were not applied.

        `names` and `numels` list the parameters that the tensor consists of, in order.
        """
        if self._kept is None:
            return
        ends = list(itertools.accumulate(numels))
        spans = [(end - numel, end) for name, numel, end in zip(names, numels, ends, strict=True) if name in unused]
        starts = [0, *itertools.accumulate(self._lengths)][:-1]
        if self._mean_chunk is not None:
            starts.append(self._mean_chunk.start)
        for encoder, kept, start in zip(self._all_encoders, self._kept, starts, strict=False):
            if (now := encoder.residual) is None:
                continue
            now = now.clone()
            before = torch.zeros_like(now) if kept is None else kept
            for low, high in spans:
                part = slice(max(0, low - start), max(0, high - start))
                now[part] = before[part]
            encoder.set_residual(now)

    # Elements that move to other tensors

    def residuals(self, names: Sequence[str], numels: Sequence[int]) -> dict[str, Residual]:
        """The residuals by parameter. Collective, because each rank holds that of its own chunk's mean."""
        likes = torch.split(self._like, self._lengths)
        own = [_or_zeros(encoder.residual, like) for encoder, like in zip(self._encoders, likes, strict=True)]
        mean = torch.zeros_like(self._like, dtype=self._wide)
        if self._mean_chunk is not None:
            chunk = _or_zeros(self._mean_encoder.residual, mean[self._mean_chunk])
            mean = torch.cat(self._transport.all_gather(chunk))
        parts = zip(torch.split(torch.cat(own), list(numels)), torch.split(mean, list(numels)), strict=True)
        return {name: Residual(*part) for name, part in zip(names, parts, strict=True)}

    def set_residuals(self, names: Sequence[str], numels: Sequence[int], residuals: Mapping[str, Residual]) -> None:
        """Take over what `residuals` returned, perhaps for other tensors; a parameter missing there starts at zero."""
        own = torch.zeros_like(self._like)
        mean = torch.zeros_like(own, dtype=self._wide)
        parts = zip(names, torch.split(own, list(numels)), torch.split(mean, list(numels)), strict=True)
        for name, own_part, mean_part in parts:
            if name in residuals:
                own_part.copy_(residuals[name].own)
                mean_part.copy_(residuals[name].mean)
        for encoder, part in zip(self._encoders, torch.split(own, self._lengths), strict=True):
            encoder.set_residual(part)
        if self._mean_chunk is not None:
            self._mean_encoder.set_residual(mean[self._mean_chunk])

    @property
    def _wide(self) -> torch.dtype:
        """The dtype in which means are computed."""
        return wide(self._like.dtype)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        kept = None if self._kept is None else [None if each is None else each.clone() for each in self._kept]
        return {
            "encoders": [encoder.state_dict() for encoder in self._encoders],
            "mean_encoder": self._mean_encoder.state_dict(),
            "kept": kept,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if `state` was saved with another compressor or another number of ranks."""
        check_residuals(state, self._mean_encoder, self._transport.world_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        if not has_residuals(state):
            return
        for encoder, each in zip(self._encoders, state["encoders"], strict=True):
            encoder.load_state_dict(each)
        self._mean_encoder.load_state_dict(state["mean_encoder"])
        self._kept = state.get("kept")


def has_residuals(state: Mapping[str, Any]) -> bool:
    """Whether the `state` of a `CompressedMean` holds what an encoder carried over."""
    return any(state["encoders"]) or bool(state["mean_encoder"])


def check_residuals(state: Mapping[str, Any], compressor: Compressor | None, num_ranks: int | None = None) -> None:
    """Raise `ConfigError` unless `compressor` can go on from the `state` of a `CompressedMean`.

    It can if its own state has the same keys and the values are cut into the same streams. The streams are compared
    only if `num_ranks` says how many ranks exchange here.
    """
    check_fields(state, "a compressed mean in this state", encoders=list, mean_encoder=Mapping)
    for each in state["encoders"]:
        check_fields(each, "an encoder in this state")
    kept = state.get("kept")
    if kept is not None and not (isinstance(kept, list) and len(kept) == 1 + len(state["encoders"])):
        raise ConfigError(f"'kept' in a compressed mean in this state is {reprlib.repr(kept)}. {NOT_SAVED}")
    for each in kept or ():
        if each is not None:
            check_saved_tensor("kept", each)
    if not has_residuals(state):
        return
    num_streams = len(state["encoders"])
    is_gathered = num_streams == 1  # of one rank alone nothing is compressed
    is_cut_alike = compressor is None or num_ranks in (None, 1) or is_gathered == compressor.gathers
    if compressor is None or not is_cut_alike or not _can_load(compressor, state["mean_encoder"]):
        raise ConfigError(
            f"compressor={compressor!r} cannot load the compression residuals in this state, which another compressor "
            "has saved. Resume with that compressor, or leave the algorithm's state out."
        )
    _check_loads(compressor, [*state["encoders"], state["mean_encoder"]])
    if num_ranks is not None and not is_gathered and num_streams != num_ranks:
        raise ConfigError(
            f"this state was saved by {num_streams} ranks that exchange, and here are {num_ranks}: its compression "
            f"residuals belong to the chunks of {num_streams} ranks. Resume with as many, or leave the algorithm's "
            "state out."
        )


def _check_loads(compressor: Compressor, states: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ConfigError` unless an encoder takes each of these states."""
    if compressor.for_bucket() is compressor:
        return  # there is none to try it with
    for state in states:
        try:
            compressor.for_bucket().load_state_dict(state)
        except Exception as error:  # whatever a compressor of the user's raises
            raise ConfigError(
                f"compressor={compressor!r} cannot load the state {reprlib.repr(state)} of an encoder: "
                f"{type(error).__name__}: {error}. {NOT_SAVED}"
            ) from error


def carries_state(compressor: Compressor) -> bool:
    """Whether `compressor` carries state from one tensor to the next, and so serves one stream only."""
    return compressor.for_bucket() is not compressor


def _can_load(compressor: Compressor, saved: Mapping[str, Any]) -> bool:
    """Whether the state of `compressor` has the keys of `saved`."""
    fresh = compressor.for_bucket()
    state = fresh.state_dict()
    return bool(state or fresh is not compressor) and _has_keys_of(state, saved)


def _has_keys_of(state: Any, saved: Any) -> bool:
    """Whether nested dicts have the same keys; an empty `state` may get its keys with the first tensor."""
    if not isinstance(state, Mapping) or not state:
        return True
    same = isinstance(saved, Mapping) and state.keys() == saved.keys()
    return same and all(_has_keys_of(each, saved[key]) for key, each in state.items())


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed: float32 for the half types."""
    return dtype if dtype.itemsize > 2 else torch.float32


def _or_zeros(residual: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if residual is None else residual.to(like.device)
