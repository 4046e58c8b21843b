"""Whether an optimizer has used a round's gradients: GradScaler skips a step without telling anybody."""

from __future__ import annotations

from torch.optim import Optimizer

from murmura.algorithms.base import AlgorithmImpl, Replica
from murmura.algorithms.checks import check_replica


def gradients_are_gone(replica: Replica) -> bool:
    """Whether nothing is left of the last round's gradients; if no step was taken since, it was skipped.

    Otherwise the next backward accumulates on them. On a GPU the host waits, unless all gradients are None.
    """
    check_replica(replica)
    gradients = [each.grad for each in replica.parameters if each.grad is not None]
    return not any(bool(gradient.any()) for gradient in gradients)


class SkippedStepsImpl(AlgorithmImpl):
    """The base of algorithms that undo what rounds have left behind when the step after them is skipped.

    `skip_step` undoes it, and is also called when the gradients are gone without a step. `round_is_over` keeps it.
    """

    _rounds_since_step = 0

    def setup(self, replica: Replica) -> None:
        self._replica = replica

    def remembers(self) -> bool:
        """Whether there is anything to undo."""
        return True

    def before_round(self) -> None:
        self._notice_skipped_step()

    def before_backward(self) -> None:
        self._notice_skipped_step()

    def _notice_skipped_step(self) -> None:
        if self._rounds_since_step and self.remembers() and gradients_are_gone(self._replica):
            self.skip_step()
            self._rounds_since_step = 0

    def after_backward(self) -> None:
        self._rounds_since_step += 1

    def before_step(self, optimizer: Optimizer) -> None:
        self.round_is_over()

    def round_is_over(self) -> None:
        self._rounds_since_step = 0
