"""Uneven data as torch's `join()` treats it: a rank that has left its loop takes part in later rounds, with zeros.

Before a round begins and before its gradients are exchanged, the ranks vote on what comes next: those still in their
loop say which of the two, those that have left it say nothing. A rank that has left does the same as the voters until
nobody says anything any more. Then all take over the weights of a rank that was in its loop to the end.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from murmura.algorithms import AlgorithmImpl, GradientAllReduceAlgorithmImpl
from murmura.ddp.replica import ModelReplica
from murmura.ddp.round import Event, Round
from murmura.ddp.settling import Settling
from murmura.errors import UsageError
from murmura.transports.base import Transport


class Stage(enum.IntEnum):
    """What a rank that is still in its loop does next. The larger one wins a vote, and none is 0."""

    BEGIN = 1
    EXCHANGE = 2


class _Votes(NamedTuple):
    stage: int  # what the ranks in their loop do next; 0 if there is none
    source: int  # the last rank that is in its loop; -1 if there is none
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


class UnevenInputs:
    """The context of one model; `weighs` says whether means divide by the ranks that have data."""

    def __init__(self, model: Shadowed) -> None:
        self._model: Shadowed = weakref.proxy(model)  # which owns this object
        self._channel: Transport | None = None
        self._throws = False
        self.active = False
        self.shadows = False  # this rank has left its loop
        self.weighs = False

    @contextlib.contextmanager
    def context(self, *, divide_by_initial: bool, throws: bool) -> Iterator[None]:
        """Around a training loop; when the loop ends here, this rank takes part in the rounds of the others."""
        self._check()
        if self._model.channel.world_size == 1:
            yield
            return
        if self._channel is None:
            self._channel = self._model.channel.channel("join")
        self.active, self.weighs, self._throws = True, not divide_by_initial, throws
        try:
            yield
            self.shadows = True
            self._follow_the_others()
        finally:
            self.active = self.shadows = self.weighs = False
            self._model.settling.buffer_source = 0

    def _check(self) -> None:
        if self.active:
            raise UsageError("ddp.join() is already open; leave its block before you open another.")
        algorithm = self._model.algorithm
        if not isinstance(algorithm, GradientAllReduceAlgorithmImpl) or not algorithm.averages:
            raise UsageError(
                f"join() without a loader stands in for a rank that is out of data by zero gradients in a mean, and "
                f"{type(algorithm).__name__} does not average gradients here. Give it the loader, which works for "
                "every algorithm: for batch in ddp.join(loader)."
            )

    def announce(self, stage: Stage) -> None:
        """Tell the ranks that have left what comes next, unless this is one of them."""
        if not self.active or self.shadows:
            return
        if self._vote(stage).some_left and self._throws:
            raise UsageError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks, as "
                "throw_on_early_termination=True asks for; leave it out to train on with the others."
            )

    def _follow_the_others(self) -> None:
        model, waited = self._model, False
        model.settling.settle()
        parameters = model.replica.parameters
        kept = [None if each.grad is None else each.grad.clone() for each in parameters]  # buckets are overwritten
        while (votes := self._vote(None)).stage:
            waited = True
            if self._throws:
                raise UsageError(
                    f"Rank {model.channel.rank} exhausted all inputs, and others have not. "
                    "throw_on_early_termination=True asks for this error; leave it out to train on with the others."
                )
            if votes.stage == Stage.BEGIN:
                model.round.apply(Event.FORWARD)
                model.begin()
            else:
                for parameter in parameters:  # an older gradient is no part of this round
                    parameter.grad = None
                model.finish(Event.SYNC)
                model.settling.settle()
        if waited:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
        # The last to leave have done every step.
        ranks = torch.tensor([-1 if waited else model.channel.rank])
        assert self._channel is not None
        self._channel.all_reduce(ranks, "max")
        model.take_over(int(ranks), whole=False)

    def _vote(self, stage: Stage | None) -> _Votes:
        assert self._channel is not None
        here = [0, -1, 1] if stage is None else [int(stage), self._channel.rank, 0]
        votes = torch.tensor(here)
        self._channel.all_reduce(votes, "max")
        code, source, some_left = votes.tolist()
        if source >= 0:
            self._model.settling.buffer_source = source
        return _Votes(code, source, bool(some_left))

    def refuse_switch(self) -> None:
        """Refuse another algorithm while ranks may be standing in for this one."""
        if self.active:
            raise UsageError("set_algorithm() was called inside ddp.join(). Call it outside its block.")
