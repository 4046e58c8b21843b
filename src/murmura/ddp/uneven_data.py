"""Uneven data: a rank that has run out replays its last batch, with no weight, until all have.

The user's whole loop thus runs on every rank, whatever the algorithm, and nobody waits for a rank that has left it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from murmura.ddp.hooks import with_gradient
from murmura.ddp.join_context import Shadowed, UnevenInputs
from murmura.ddp.tail import DataShares
from murmura.errors import UsageError
from murmura.transports.base import Transport

Batch = TypeVar("Batch")


class Joined(Shadowed, Protocol):
    """The model whose batches are joined."""

    @property
    def module(self) -> nn.Module: ...

    def gradients_begin(self) -> None: ...


class Joining:
    """Counts, for the round under way, the batches that were data and those that were replayed."""

    def __init__(self, model: Joined) -> None:
        self._model: Joined = weakref.proxy(model)  # which owns this object
        self._channel: Transport | None = None
        self._num_batches = 0
        self._num_real = 0
        self._num_real_anywhere = 0  # on all ranks together
        self._num_with_data = 0  # the ranks for which the last batch was data
        self.active = False
        self.replaying = False
        self.uneven = UnevenInputs(model)

    @property
    def shares(self) -> DataShares:
        """The shares of real batches in the round; all ranks take the same number of batches in a round."""
        size = self._model.channel.world_size
        # Whether the round has batches of a join in it, some of which may be replayed on another rank.
        weighs = self.active or self._num_batches > 0 or self.uneven.weighs
        if self.uneven.active:
            return DataShares(0.0 if self.uneven.shadows else 1.0, self.uneven.num_in_loop / size, weighs)
        if self._num_batches:
            mean = self._num_real_anywhere / (self._num_batches * size)
            return DataShares(self._num_real / self._num_batches, mean, weighs)
        if self.active:  # a further round of the same batch
            return DataShares(0.0 if self.replaying else 1.0, self._num_with_data / size, weighs)
        return DataShares(1.0, 1.0, weighs)

    def round_ended(self) -> None:
        self._num_batches = self._num_real = self._num_real_anywhere = 0

    def forget_broken_loop(self) -> None:
        """Forget the batches counted so far if the loop was left early: they do not belong to the round that begins."""
        if not self.active:
            self.round_ended()

    def context(self, divide_by_initial: bool, enable: bool, throws: bool) -> AbstractContextManager[None]:
        """torch's context manager around a loop over uneven data."""
        if not enable:
            return nullcontext()
        if self.active:
            raise UsageError("ddp.join(loader) is running; finish or break its loop before you open join().")
        return self.uneven.context(divide_by_initial=divide_by_initial, throws=throws)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of `loader`, then the last one again until every rank has seen all of its own."""
        if self.active or self.uneven.active:
            raise UsageError("ddp.join() is already running; finish or break its loop before you start another.")
        self._model.settling.settle()
        if self._channel is None:
            self._channel = self._model.channel.channel("join")
        self.active = True
        self.round_ended()
        batches = iter(loader)
        last: list[Batch] = []
        parameters = [each for each in self._model.module.parameters() if each.is_floating_point() or each.is_complex()]
        handles = [with_gradient(each, partial(each.register_hook, self._before_gradient)) for each in parameters]
        try:
            while True:
                try:
                    last = [next(batches)]
                    real = True
                except StopIteration:
                    real = False
                self._model.settling.settle()  # other ranks may wait for the exchanges of a step that was skipped here
                votes = torch.tensor([int(real), int(not last)])
                self._channel.all_reduce(votes, "sum")
                self._num_with_data, num_without_any = votes.tolist()
                if self._num_with_data == 0:
                    return
                if num_without_any:
                    raise UsageError(
                        f"{num_without_any} of the ranks have no batch at all, so there is nothing for them to replay. "
                        "Give every rank at least one batch."
                    )
                self.replaying = not real
                self._num_batches += 1
                self._num_real += real
                self._num_real_anywhere += self._num_with_data
                yield last[0]
        finally:
            self.active = self.replaying = False
            for handle in handles:
                handle.remove()

    def _before_gradient(self, gradient: Tensor) -> Tensor | None:
        """Called before a gradient is accumulated: a replayed batch moves no weight, not even if it gives NaN."""
        self._model.gradients_begin()
        return torch.zeros_like(gradient) if self.replaying else None
