"""Uneven data as torch's `join()` treats it: a rank that has left its loop takes part in later rounds, with zeros.

Before a round begins and before its gradients are exchanged, the ranks vote on what comes next: those still in their
loop say which of the two, those that have left it say nothing. A rank that has left does the same as the voters until
nobody says anything any more. Then all take over the weights of a rank that was in its loop to the end.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from murmura.algorithms import AlgorithmImpl
from murmura.ddp.replica import ModelReplica
from murmura.ddp.round import Event, Round
from murmura.ddp.settling import Settling
from murmura.errors import UsageError
from murmura.transports.base import Transport
from murmura.types import Exchanges


class Stage(enum.IntEnum):
    """What a rank that is still in its loop does next. The larger one wins a vote, and none is 0."""

    BEGIN = 1
    EXCHANGE = 2


class _Votes(NamedTuple):
    stage: int  # what the ranks in their loop do next; 0 if there is none
    some_left: bool


class Shadowed(Protocol):
    """The model whose rounds a rank without data takes part in."""

    @property
    def algorithm(self) -> AlgorithmImpl: ...

    @property
    def channel(self) -> Transport: ...

    @property
    def replica(self) -> ModelReplica: ...

    @property
    def round(self) -> Round: ...

    @property
    def settling(self) -> Settling: ...

    def begin(self) -> None: ...

    def finish(self, event: Event) -> None: ...

    def take_over(self, root: int, *, whole: bool) -> None: ...


def _always() -> bool:
    return True


class UnevenInputs:
    """The context of one model; `weighs` says whether means divide by the ranks that have data."""

    def __init__(self, model: Shadowed) -> None:
        self._model: Shadowed = weakref.proxy(model)  # which owns this object
        self._channel: Transport | None = None
        self._is_open = False
        self._is_enabled: Callable[[], bool] = _always
        self._notify: Callable[[], object] | None = None
        self._throws = False
        self._kept: list[Tensor | None] = []
        self.shadows = False  # this rank has left its loop
        self.weighs = False
        self.num_in_loop = 0  # the ranks that are still in their loop, as of the last vote

    @property
    def active(self) -> bool:
        return self._is_open and self._is_enabled()

    @contextlib.contextmanager
    def context(self, *, divide_by_initial: bool, throws: bool) -> Iterator[None]:
        """Around a training loop; when the loop ends here, this rank takes part in the rounds of the others."""
        self.open(divide_by_initial=divide_by_initial, throws=throws)
        try:
            yield
            if self.active:
                self._follow_to_the_end()
        finally:
            self._close()

    def open(
        self,
        *,
        divide_by_initial: bool,
        throws: bool = False,
        is_enabled: Callable[[], bool] = _always,
        notify: Callable[[], object] | None = None,
    ) -> None:
        """Begin to tell ranks that have left of the rounds here. `notify` is called before each of them."""
        if self.active:
            raise UsageError("ddp.join() is already open; leave its block before you open another.")
        algorithm = self._model.algorithm
        # Its class says so: what changes from round to round may end while a rank stands in.
        if type(algorithm).exchanges is not Exchanges.GRADIENTS or not algorithm.averages:
            raise UsageError(
                f"join() without a loader stands in for a rank that is out of data by zero gradients in a mean, and "
                f"{type(algorithm).__name__} does not average gradients here. Give it the loader, which works for "
                "every algorithm: for batch in ddp.join(loader)."
            )
        if self._channel is None:
            self._channel = self._model.channel.channel("join")
        self._is_open, self._is_enabled, self._notify = True, is_enabled, notify
        self.weighs, self._throws = not divide_by_initial, throws

    def announce(self, stage: Stage) -> None:
        """Tell the ranks that have left what comes next, unless this is one of them."""
        if not self.active or self.shadows:
            return
        if self._notify is not None and (stage is Stage.BEGIN or not self._model.round.begun):
            self._notify()
        if self._vote(stage).some_left and self._throws:
            raise UsageError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks, as "
                "throw_on_early_termination=True asks for; leave it out to train on with the others."
            )

    def follow_one_round(self) -> None:
        """Take part in the next round of the ranks that are still in their loop."""
        self._leave()
        stage = self._vote(None).stage
        while stage:
            self._shadow(stage)
            stage = 0 if stage == Stage.EXCHANGE else self._vote(None).stage

    def end(self, *, is_last: bool) -> None:
        """All have left: take over the weights of the last, who have done every step."""
        assert self._channel is not None
        if self._kept:
            for parameter, gradient in zip(self._model.replica.parameters, self._kept, strict=True):
                parameter.grad = gradient
        ranks = torch.tensor([self._channel.rank if is_last else -1])
        self._channel.all_reduce(ranks, "max")
        self._model.take_over(int(ranks), whole=False)
        self._close()

    def _follow_to_the_end(self) -> None:
        is_last = True
        self._leave()
        while stage := self._vote(None).stage:
            is_last = False
            if self._throws:
                raise UsageError(
                    f"Rank {self._model.channel.reporter.own} exhausted all inputs, and others have not. "
                    "throw_on_early_termination=True asks for this error; leave it out to train on with the others."
                )
            self._shadow(stage)
        self.end(is_last=is_last)

    def _leave(self) -> None:
        """This rank has left its loop, at the first call."""
        if not self.shadows:
            self.shadows = True
            self._model.settling.settle()
            gradients = [each.grad for each in self._model.replica.parameters]  # the buckets will be overwritten
            self._kept = [None if each is None else each.clone() for each in gradients]

    def _shadow(self, stage: int) -> None:
        """Do what the ranks in their loop do, with nothing to add to it."""
        model = self._model
        if stage == Stage.BEGIN:
            model.round.apply(Event.FORWARD)
            model.begin()
            return
        for parameter in model.replica.parameters:
            parameter.grad = None
        model.finish(Event.SYNC)
        model.algorithm.round_is_over()
        model.settling.settle()

    def _close(self) -> None:
        self._is_open = self.shadows = self.weighs = False
        self._kept = []
        self._model.settling.buffer_source = 0

    def _vote(self, stage: Stage | None) -> _Votes:
        assert self._channel is not None
        size = self._channel.world_size
        votes = torch.zeros(size, dtype=torch.int64)
        votes[self._channel.rank] = 0 if stage is None else int(stage)
        self._channel.all_reduce(votes, "sum")
        in_loop = votes.nonzero().view(-1).tolist()
        self.num_in_loop = len(in_loop)
        if in_loop:
            self._model.settling.buffer_source = in_loop[-1]
        return _Votes(int(votes.max()), self.num_in_loop < size)

    def refuse_switch(self) -> None:
        """Refuse another algorithm while ranks may be standing in for this one."""
        if self.active:
            raise UsageError("set_algorithm() was called inside ddp.join(). Call it outside its block.")
