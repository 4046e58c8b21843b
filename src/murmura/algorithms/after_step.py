"""What algorithms that exchange weights after the optimizer's step have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from murmura.algorithms.base import AlgorithmImpl, Replica
from murmura.algorithms.switching import average_known_moments
from murmura.algorithms.weights import FlatWeights
from murmura.errors import PeerTimeout
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class AfterStepImpl(AlgorithmImpl, ABC):
    """Calls `communicate` once for each round that `is_due`: on every rank as often, whichever steps are skipped.

    That is after the optimizers' steps. A rank that skipped its step communicates before its next round, or as soon as
    it would wait for others in an operation of the user's while these wait for it. It cannot know by itself whether
    its step was skipped or is still to come, so the ranks vote: they communicate if any has stepped. Where nobody waits
    for the exchange that follows a step, it begins with the vote, so that nobody waits for that either.
    """

    exchanges = Exchanges.WEIGHTS
    due_round = -1
    """The round that `communicate` is called for."""

    has_voted = False
    """Whether the ranks have voted when `communicate` is called; if not, the exchange that it starts begins so."""

    _is_last_due = False
    _is_restarted = False  # other weights were loaded, which may differ between the ranks

    @abstractmethod
    def is_due(self, number: int) -> bool:
        """Whether the ranks communicate after round `number`."""

    @abstractmethod
    def communicate(self) -> None:
        """Exchange the weights and write them."""

    average_moments = False
    """Whether what optimizers remember is averaged with every exchange of weights."""

    def averages_moments_after(self, number: int) -> bool:
        """Whether what optimizers remember is averaged after round `number`, in which the ranks communicate."""
        return self.average_moments

    def waits_after(self, number: int) -> bool:
        """Whether this rank waits for others when it communicates after round `number`: then they vote before."""
        return True

    def channel_beside(self, number: int) -> Transport | None:
        """Where the exchange travels that begins after round `number` and does not wait; None if none begins."""
        return None

    @abstractmethod
    def use(self, weights: FlatWeights) -> None:
        """Exchange `weights` from now on, which are equal on all ranks."""

    def start_from_mean(self) -> None:
        """Let the ranks, which may have loaded different weights, go on from what is derived from their mean."""

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        self._due: deque[int] = deque()  # rounds whose exchange is still to come
        self._weights = FlatWeights(replica)
        self.use(self._weights)

    def after_backward(self) -> None:
        self._is_last_due = self.is_due(self._replica.round)
        if self._is_last_due:
            self._due.append(self._replica.round)

    def before_step(self, optimizer: Optimizer) -> None:
        self._settle_all_but(int(self._is_last_due))

    def after_steps(self) -> None:
        self.settle()

    def settle(self) -> None:
        self._settle_all_but(0)

    def before_collective(self) -> None:
        while self._due and self._has_any_stepped(False):
            self._communicate_once()

    def _settle_all_but(self, num_left: int) -> None:
        while len(self._due) > num_left:
            self._has_any_stepped(True)
            self._communicate_once()

    def _communicate_once(self) -> None:
        self.due_round = self._due.popleft()
        if self._is_restarted and self.process_group.world_size > 1:
            self.start_from_mean()
        self._is_restarted = False
        self.communicate()
        if self.averages_moments_after(self.due_round) and self.process_group.world_size > 1:
            average_known_moments(self._replica)

    def _has_any_stepped(self, here: bool) -> bool:
        """Whether a rank has stepped, or will not: so that the exchange is due now."""
        number = self._due[0]
        waits = self._is_restarted or self.waits_after(number)
        channel = self.process_group if waits else self.channel_beside(number)
        self.has_voted = waits or not here
        if self.process_group.world_size == 1 or channel is None or not self.has_voted:
            return here
        return self.vote(channel, number, here)

    def vote(self, channel: Transport, number: int, here: bool) -> bool:
        """Whether this rank or another has stepped, or will not, after round `number`. Collective, in any thread."""
        # Where the transport works: on a GPU the host then does not wait, for whoever votes yes knows the outcome.
        device = channel.device
        vote = torch.full((1,), int(here), dtype=torch.int32, device="cpu" if device is None else device)
        try:
            channel.all_reduce(vote, ReduceOp.MAX)
        except PeerTimeout as error:
            error.add_note(
                f"Rank {error.peer} has not come to the exchange of weights after round {number}. Did it skip its "
                "optimizer's step? Then it comes before its next forward or murmura collective; one of "
                "torch.distributed's own cannot be seen, and must not stand between."
            )
            raise
        return here or bool(vote.item())

    def parameters_added(self) -> None:
        state = self.state_dict()
        self._weights = self._weights.extended()
        self.use(self._weights)
        self.take_state(state)

    def weights_replaced(self) -> None:
        self.use(self._weights)
        self._is_restarted = True

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; what it says nothing of stays as `use` has left it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved: the weights that were loaded before are those that belong to it."""
        self.take_state(state)
        self._is_restarted = False
