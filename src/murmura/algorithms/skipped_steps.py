"""Whether an optimizer has used a round's gradients: GradScaler skips a step without telling anybody."""

from __future__ import annotations

from murmura.algorithms.base import Replica
from murmura.algorithms.checks import check_replica


def gradients_are_gone(replica: Replica) -> bool:
    """Whether nothing is left of the last round's gradients; if no step was taken since, it was skipped.

    Otherwise the next backward accumulates on them. On a GPU the host waits, unless all gradients are None.
    """
    check_replica(replica)
    gradients = [each.grad for each in replica.parameters if each.grad is not None]
    return not any(bool(gradient.any()) for gradient in gradients)
