"""A DataLoader over a rank's share of the data, with equally many batches on every rank and a resumable position."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from murmura.data.sharding import ShardedSampler, derive_seed, whole_number
from murmura.errors import ConfigError
from murmura.transports.base import Transport

_OURS = ("sampler", "batch_sampler", "generator")


def loader(
    dataset: Dataset[Any],
    transport: Transport | tuple[int, int],
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> Loader:
    """Return a loader of this rank's share of `dataset` in batches of `batch_size` samples per rank.

    Every rank has the same number of batches, and every sample is in exactly one. The last batch of an epoch is
    smaller if necessary; if some ranks would have none, its samples join the batch before, which then has one more than
    `batch_size`. `drop_last` leaves it out.

    Args:
        transport: a transport, or a pair of rank and world size.
        seed: of the order, and of the workers' random numbers; the same on all ranks.
        options: of torch's DataLoader: ``num_workers``, ``collate_fn``, ``pin_memory``, ``worker_init_fn``, ...
    """
    if taken := [name for name in _OURS if options.get(name) is not None]:
        raise ConfigError(
            f"{taken[0]}= is set by this loader itself. Leave it out, or build a DataLoader on a "
            "murmura.data.ShardedSampler."
        )
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            "an IterableDataset has no indices that could be divided among the ranks. Let it give each rank its "
            "share itself, and build a torch DataLoader on it."
        )
    batch_size = whole_number("batch_size", batch_size, 1)
    sampler = ShardedSampler(dataset, transport, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
    if sampler.num_samples < sampler.world_size:
        raise ConfigError(
            f"{sampler.num_samples} samples do not give each of {sampler.world_size} ranks one. "
            "Use fewer ranks, or more data."
        )
    return Loader(dataset, sampler, batch_size, drop_last, options)


class Loader:
    """An iterable of batches, made by `loader`; each pass is one epoch.

    A pass starts at the beginning of its epoch, except the first one after `load_state_dict`, which starts at the saved
    position. A batch counts as consumed when it is yielded, however many more the workers have fetched. Passes do not
    draw from the process's own random generators. In worker processes
    Python's, numpy's and torch's generators are seeded for each batch from seed, epoch, rank and position, so that
    a resumed run sees the same random augmentations; without workers they are the process's own.
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: ShardedSampler, batch_size: int, drop_last: bool, options: dict[str, Any]
    ) -> None:
        self.sampler = sampler
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._is_resumed = False
        self._batches = _Batches(self.sampler, batch_size, drop_last)
        self._generator = torch.Generator()
        self._loader = DataLoader(
            _Seeded(dataset),
            batch_sampler=self._batches,  # type: ignore[arg-type]  # torch only passes batches to __getitems__
            generator=self._generator,
            **options,
        )

    @property
    def epoch(self) -> int:
        """The epoch of the current pass, or of the next one if there is none."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` with the next pass; a restored position is kept if that is the current epoch."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, which is equal on all ranks."""
        return self._batches.count(self.sampler.num_samples)

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler
        if not self._is_resumed:
            sampler.rewind()
        self._is_resumed = False
        # torch draws the seeds of the workers from it at the beginning of a pass.
        self._generator.manual_seed(derive_seed(sampler.seed, sampler.epoch, sampler.rank))
        sizes = [len(indices) for _, indices in self._batches]
        for num_samples, batch in zip(sizes, self._loader, strict=True):
            sampler.advance(num_samples)
            yield batch
        sampler.set_epoch(sampler.epoch + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the position after the batches that were yielded."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the next pass where `state_dict` was taken, also with another number of ranks."""
        self.sampler.load_state_dict(state)
        self._is_resumed = True


class _Batches:
    """Yields the batches of a rank from the sampler's position on, each with a seed."""

    def __init__(self, sampler: ShardedSampler, batch_size: int, drop_last: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last

    def count(self, num_samples: int) -> int:
        """Return the number of batches in `num_samples` samples: as many as the rank with the fewest can fill."""
        num_whole, rest = divmod(num_samples // self._sampler.world_size, self._batch_size)
        return num_whole + (rest > 0 and not self._drop_last)

    def __len__(self) -> int:
        return self.count(self._sampler.num_samples - self._sampler.position)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        sampler, size, num_batches = self._sampler, self._batch_size, len(self)
        indices, start = list(sampler), sampler.position
        for number in range(num_batches):
            is_last = number == num_batches - 1 and not self._drop_last
            seed = derive_seed(sampler.seed, sampler.epoch, sampler.rank, start + number * size * sampler.world_size)
            yield seed, indices[number * size : None if is_last else (number + 1) * size]


class _Seeded(Dataset[Any]):
    """Wraps `dataset` to seed the workers' random generators for each batch, whatever they fetched before."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[Any]:
        seed, indices = batch
        if get_worker_info() is not None:
            _seed_all(seed)
        if callable(fetch := getattr(self._dataset, "__getitems__", None)):
            samples: list[Any] = fetch(indices)
            return samples
        return [self._dataset[index] for index in indices]


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
