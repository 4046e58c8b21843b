"""What all means of compressed values have in common: their encoders, and what these leave over for the next one."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmura.compressors import Compressor
from murmura.errors import ConfigError
from murmura.transports.base import Transport


class Residual(NamedTuple):
    """What compression left over of one parameter: on this rank, and in the means, on all ranks alike."""

    own: Tensor
    mean: Tensor


class CompressedMean(ABC):
    """Means over `transport` of flat tensors like `like`, one after another, the same bits on every rank.

    This rank's values are encoded in streams of `lengths` elements, end to end. Where a rank encodes a mean for all
    (`mean_chunk` says where it lies in the tensor), that is a stream too. What an encoder remembers belongs to one
    stream, so every stream has its own. `shares[r]` is the weight of rank r; without `average` it is their sum.
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
        self._keeps_residuals = self._mean_encoder is not compressor

    @abstractmethod
    def __call__(self, flat: Tensor) -> None:
        """Overwrite `flat` with the mean."""

    @property
    def _all_encoders(self) -> list[Compressor]:
        return [*self._encoders, self._mean_encoder]

    # Steps that are skipped

    def keep_residuals(self) -> None:
        """Keep what is left over now, unless older residuals are kept: the next means may be thrown away."""
        if self._keeps_residuals and self._kept is None:
            self._kept = [encoder.lend_residual() for encoder in self._all_encoders]

    @property
    def has_kept(self) -> bool:
        """Whether residuals of before are kept."""
        return self._kept is not None

    def forget_kept(self) -> None:
        """The means have been applied."""
        self._kept = None

    def restore_kept(self) -> None:
        """The means have been thrown away: what they left over is void, and what was kept counts again."""
        if self._kept is not None:
            for encoder, residual in zip(self._all_encoders, self._kept, strict=True):
                encoder.set_residual(residual)
            self._kept = None

    def restore_kept_of(self, unused: Collection[str], names: Sequence[str], numels: Sequence[int]) -> None:
        """The means of the parameters `unused` have been thrown away: what was kept of these counts again.

        `names` and `numels` say which parameters the tensor is made of, end to end.
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
        """What compression left over, by parameter. Collective: each rank holds that of its chunk's mean."""
        likes = torch.split(self._like, self._lengths)
        own = [_or_zeros(encoder.residual, like) for encoder, like in zip(self._encoders, likes, strict=True)]
        mean = torch.zeros_like(self._like, dtype=self._wide)
        if self._mean_chunk is not None:
            chunk = _or_zeros(self._mean_encoder.residual, mean[self._mean_chunk])
            mean = torch.cat(self._transport.all_gather(chunk))
        parts = zip(torch.split(torch.cat(own), list(numels)), torch.split(mean, list(numels)), strict=True)
        return {name: Residual(*part) for name, part in zip(names, parts, strict=True)}

    def set_residuals(self, names: Sequence[str], numels: Sequence[int], residuals: Mapping[str, Residual]) -> None:
        """Take over what `residuals` returned, perhaps of other tensors; a parameter that is not there has none."""
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
        """What means are computed in."""
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
        """Raise `ConfigError` if `state` is of another compressor, or of chunks of another number of ranks."""
        check_left_over(state, self._mean_encoder, self._transport.world_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not is_left_over(state):
            return
        self.check_state(state)
        for encoder, each in zip(self._encoders, state["encoders"], strict=True):
            encoder.load_state_dict(each)
        self._mean_encoder.load_state_dict(state["mean_encoder"])
        self._kept = state.get("kept")


def is_left_over(state: Mapping[str, Any]) -> bool:
    """Whether the state of a `CompressedMean` holds anything."""
    return any(state["encoders"]) or bool(state["mean_encoder"])


def check_left_over(state: Mapping[str, Any], compressor: Compressor | None, num_ranks: int | None = None) -> None:
    """Raise `ConfigError` unless `compressor` can go on from the `state` of a `CompressedMean`.

    It can if it remembers the same things, of streams that are cut alike. How they are cut is only looked at where
    `num_ranks` says how many ranks exchange here.
    """
    if not is_left_over(state):
        return
    num_streams = len(state["encoders"])
    is_gathered = num_streams == 1  # of one rank alone nothing is compressed
    is_cut_alike = compressor is None or num_ranks in (None, 1) or is_gathered == compressor.gathers
    if compressor is None or not is_cut_alike or not _remembers(compressor, state["mean_encoder"]):
        raise ConfigError(
            f"compressor={compressor!r} cannot take over what compression left over in this state: another compressor "
            "has saved it. Go on with that one, or leave the algorithm's state out."
        )
    if num_ranks is not None and not is_gathered and num_streams != num_ranks:
        raise ConfigError(
            f"this state was saved by {num_streams} ranks that exchange, and here are {num_ranks}: what compression "
            "left over belongs to chunks that are cut otherwise. Go on with as many ranks, or leave the algorithm's "
            "state out."
        )


def _remembers(compressor: Compressor, saved: Mapping[str, Any]) -> bool:
    """Whether `compressor` remembers such things as are in `saved`."""
    fresh = compressor.for_bucket()
    state = fresh.state_dict()
    return bool(state or fresh is not compressor) and _has_keys_of(state, saved)


def _has_keys_of(state: Any, saved: Any) -> bool:
    """Whether nested dicts have the same keys; where `state` has none, they may come with the first tensor."""
    if not isinstance(state, Mapping) or not state:
        return True
    same = isinstance(saved, Mapping) and state.keys() == saved.keys()
    return same and all(_has_keys_of(each, saved[key]) for key, each in state.items())


def wide(dtype: torch.dtype) -> torch.dtype:
    """What values of `dtype` are summed in: halves in fp32."""
    return dtype if dtype.itemsize > 2 else torch.float32


def _or_zeros(residual: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if residual is None else residual.to(like.device)
