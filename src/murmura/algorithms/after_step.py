"""The base of algorithms that exchange weights after the optimizer's step."""

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
from murmura.errors import PeerTimeout, UsageError
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class AfterStepImpl(AlgorithmImpl, ABC):
    """Calls `communicate` after the optimizers' steps, once for each round that `is_due`, equally often on every rank.

    A rank that skipped its step (a GradScaler found an infinity, say) must still take part. It communicates before its
    next round, or earlier if it is about to wait for others in an operation of the user's, while these may wait for it
    here. It cannot tell whether its own step was skipped or is still to come, so the ranks vote: they communicate if
    any of them has stepped. An exchange in the background begins with the vote, so that no rank waits for the vote.

    Moments can be averaged only when every rank knows its optimizers: after a resume a rank that skips its step knows
    none. They are then averaged alone after the first round in which all do.
    """

    exchanges = Exchanges.WEIGHTS
    due_round = -1
    """The round after which `communicate` is being called."""

    has_voted = False
    """Whether the ranks have voted when `communicate` is called; if not, the exchange that it starts calls `vote`."""

    _is_last_due = False
    _is_restarted = False  # other weights were loaded, which may differ between the ranks

    @abstractmethod
    def is_due(self, number: int) -> bool:
        """Whether the ranks communicate after round `number`, counted from 0."""

    @abstractmethod
    def communicate(self) -> None:
        """Exchange the weights and write them."""

    average_moments = False
    """Whether the optimizers' moments are averaged with every exchange of weights."""

    def averages_moments_after(self, number: int) -> bool:
        """Whether the optimizers' moments are averaged after round `number`, in which the ranks communicate."""
        return self.average_moments

    def waits_after(self, number: int) -> bool:
        """Whether `communicate` waits for other ranks after round `number`; then they vote before it is called."""
        return True

    def channel_beside(self, number: int) -> Transport | None:
        """The channel of the exchange in the background that begins after round `number`; None if none begins."""
        return None

    @abstractmethod
    def use(self, weights: FlatWeights) -> None:
        """Exchange `weights` from now on, which are equal on all ranks.

        Called by `setup`, and again when other weights are loaded or parameters are thawed.
        """

    def start_from_mean(self) -> None:
        """Reset what was derived from the weights to their mean: the ranks may have loaded different weights."""

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        self._due: deque[int] = deque()  # rounds whose exchange is still to come
        self._for_moments: set[int] = set()  # those of them after which only moments are averaged
        self._weights = FlatWeights(replica)
        self.use(self._weights)

    def after_backward(self) -> None:
        is_due: bool | None = self.is_due(self._replica.round)
        if is_due is None:
            raise UsageError(f"is_due() of {type(self).__name__} returned None: return True or False.")
        self._is_last_due = is_due or self._replica.moments_pending
        if self._is_last_due:
            self._due.append(self._replica.round)
        if self._is_last_due and not is_due:
            self._for_moments.add(self._replica.round)

    def before_step(self, optimizer: Optimizer) -> None:
        self._settle(but_last=True)

    def after_steps(self) -> None:
        self._settle()

    def settle(self) -> None:
        self._settle()

    def before_collective(self) -> None:
        while self._due and self._has_any_stepped(False):
            self._communicate_once()

    def _settle(self, *, but_last: bool = False) -> None:
        """Run what is due, but not what is due after the last round if that is the `but_last`."""
        while len(self._due) > int(but_last and self._is_last_due):
            self._has_any_stepped(True)
            self._communicate_once()

    def _communicate_once(self) -> None:
        self.due_round = self._due.popleft()
        if self.due_round in self._for_moments:
            self._for_moments.remove(self.due_round)
        else:
            if self._is_restarted and self.process_group.world_size > 1:
                self.start_from_mean()
            self._is_restarted = False
            self.communicate()
        averages = self._replica.moments_pending or self.averages_moments_after(self.due_round)
        if averages and self.process_group.world_size > 1:
            self._replica.moments_pending = not average_known_moments(self._replica)
            self._try_again_after(self.due_round + 1)

    def _try_again_after(self, number: int) -> None:
        """Let round `number`, if it has ended here already, end as on ranks where it has not: with what is pending."""
        if self._replica.moments_pending and number < self._replica.round and number not in self._due:
            self._due.appendleft(number)
            self._for_moments.add(number)
            self._is_last_due |= number == self._replica.round - 1

    def _has_any_stepped(self, here: bool) -> bool:
        """Whether the oldest exchange is due now: a rank has stepped, or knows that its step was skipped."""
        number = self._due[0]
        is_plain = not self._is_restarted and not self._replica.moments_pending and number not in self._for_moments
        waits = not is_plain or self.waits_after(number)
        channel = self.process_group if waits else self.channel_beside(number)
        self.has_voted = waits or not here
        if self.process_group.world_size == 1 or channel is None or not self.has_voted:
            return here
        return self.vote(channel, number, here)

    def vote(self, channel: Transport, number: int, here: bool) -> bool:
        """Whether any rank votes yes (`here` on this one) for the exchange after round `number`.

        Collective, from any thread.
        """
        # On the transport's device: on a GPU the host need not wait, because whoever votes yes knows the outcome.
        device = channel.device
        vote = torch.full((1,), int(here), dtype=torch.int32, device="cpu" if device is None else device)
        try:
            channel.all_reduce(vote, ReduceOp.MAX)
        except PeerTimeout as error:
            error.add_note(
                f"Rank {error.peer} has not come to the exchange of weights after round {number}. Did it skip its "
                "optimizer's step? Then it comes before its next forward or murmura collective. murmura cannot see "
                "collectives of torch.distributed: call ddp.settle() before them."
            )
            raise
        return here or bool(vote.item())

    def parameters_changed(self) -> None:
        state = self.state_dict()
        self._weights = FlatWeights(self._replica)
        self.use(self._weights)
        self.take_state(state)

    def weights_replaced(self) -> None:
        self.use(self._weights)
        self._is_restarted = True

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; what is not in it stays as `use` has left it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; the weights that belong to it have been loaded before."""
        self.take_state(state)
        self._is_restarted = False
