"""ShardedSampler gives every sample to exactly one rank; its position in an epoch is one number."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from murmura.errors import ConfigError, MurmuraError, UsageError
from murmura.transports.base import Transport


class ShardedSampler(Sampler[int]):
    """Yields the indices of this rank's share of a data set, in another order each epoch; for torch's DataLoader.

    The order of an epoch is the same on all ranks, and each takes every n-th index: no sample is seen twice. If the
    number of samples is not divisible by the number of ranks, some ranks get one less: pass the loader to `ddp.join`,
    use `drop_last`, or use `murmura.data.loader`, which yields equally many batches on every rank.

    The position in an epoch counts the samples that training has consumed, not those that a DataLoader has fetched
    ahead: call `advance` for each batch, and `set_epoch` before each epoch. It counts the samples of all
    ranks, so that training can resume with another number of ranks.

    Args:
        data: the data set, or its length.
        transport: a transport, or a pair of rank and world size.
        shuffle: whether the order is random; otherwise it is that of the data set.
        seed: of the random order, the same on all ranks.
        drop_last: whether to leave out the last samples that are too few for all ranks.
    """

    def __init__(
        self,
        data: Sized | int,
        transport: Transport | tuple[int, int],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.rank, self.world_size = _place(transport)
        self.num_samples = _length(data)
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed, 0)
        self.drop_last = drop_last
        self.epoch = 0
        self._start = 0  # how many samples all ranks had consumed when this pass began
        self._num_consumed = 0  # by this rank, since then

    @property
    def position(self) -> int:
        """How many samples of the epoch all ranks together have consumed, if all are as far as this one."""
        position = self._start + self._num_consumed * self.world_size
        return position if position + self.rank < self.num_samples else self.num_samples  # nothing left for this rank

    def __len__(self) -> int:
        """Return how many samples are left for this rank."""
        num_left = self.num_samples - self.position
        num_more = 0 if self.drop_last else self.rank < num_left % self.world_size
        return num_left // self.world_size + num_more

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices from the position on."""
        mine = self._order()[self.position :][self.rank :: self.world_size]
        return iter(mine[: len(self)].tolist())

    def advance(self, num_samples: int) -> None:
        """Move the position: this rank has consumed `num_samples` more."""
        self._num_consumed += whole_number("num_samples", num_samples, 0, UsageError)

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch`; the position is kept if that is the current epoch."""
        epoch = whole_number("epoch", epoch, 0, UsageError)
        if epoch != self.epoch:
            self.epoch = epoch
            self.rewind()

    def rewind(self) -> None:
        """Go back to the beginning of the epoch."""
        self._start = self._num_consumed = 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the position, which are equal on all ranks that have consumed equally many batches."""
        return {"epoch": self.epoch, "position": self.position, "num_samples": self.num_samples, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was taken, also with another number of ranks or another batch size."""
        for what, here in (("num_samples", self.num_samples), ("seed", self.seed)):
            if state[what] != here:
                raise ConfigError(
                    f"the position was saved with {what}={state[what]}, and here it is {here}: samples would be "
                    "missed or seen twice. Use the same data and the same seed."
                )
        self.epoch = state["epoch"]
        self._start, self._num_consumed = state["position"], 0

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, self.epoch))
        return torch.randperm(self.num_samples, generator=generator)


def whole_number(name: str, value: Any, least: int, error: type[MurmuraError] = ConfigError) -> int:
    """Return `value` as an int; raise `error` with its name unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise error(f"{name}={value!r} must be a whole number, at least {least}.")
    return operator.index(value)


def derive_seed(*numbers: int) -> int:
    """Return a seed that depends on all `numbers`."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _place(transport: Transport | tuple[int, int]) -> tuple[int, int]:
    try:
        rank, world_size = transport if isinstance(transport, tuple) else (transport.rank, transport.world_size)
    except (AttributeError, ValueError):
        raise ConfigError(
            f"transport={transport!r} has no rank and world size. Pass a transport, or (rank, world_size)."
        ) from None
    rank, world_size = whole_number("rank", rank, 0), whole_number("world_size", world_size, 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a world of {world_size}. Pass a transport, or (rank, world_size).")
    return rank, world_size


def _length(data: Sized | int) -> int:
    try:
        num_samples = data if isinstance(data, int) else len(data)
    except TypeError:
        raise ConfigError(
            f"a {type(data).__name__} has no length, so it cannot be divided among the ranks. Pass a data set with "
            "__len__ and __getitem__, or let the data set itself give each rank its share."
        ) from None
    if num_samples < 0:
        raise ConfigError(f"a data set of {num_samples} samples cannot be divided among the ranks.")
    return num_samples
