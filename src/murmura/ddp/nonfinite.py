"""What happens when a gradient holds an infinity or a NaN: nothing, an error, or a step that is left out."""

from __future__ import annotations

import logging

import torch

from murmura.ddp.replica import ModelReplica
from murmura.errors import NonFiniteGradient
from murmura.types import NonFinite

log = logging.getLogger("murmura")


class NonFinitePolicy:
    """Looks at the gradients after each round, unless they pass whatever they hold."""

    def __init__(self, replica: ModelReplica, choice: NonFinite) -> None:
        self._replica = replica
        self._choice = choice
        self.skips_step = False

    def round_ended(self, number: int) -> None:
        """Round `number` has ended; `NonFiniteGradient` if that is the choice."""
        if self._choice is NonFinite.PASS:
            return
        name = self._first_nonfinite()
        self.skips_step = name is not None and self._choice is NonFinite.SKIP_STEP
        if self.skips_step:
            log.warning("the step of round %d is skipped: the gradient of %r is not finite", number, name)
        elif name is not None:
            own = self._replica.transport.reporter.own
            raise NonFiniteGradient(
                f"rank {own}: the gradient of {name!r} holds an infinity or a NaN in round "
                f"{number}. Lower the learning rate, clip, or look at the batch; with nonfinite='skip_step' such steps "
                "are left out."
            )

    def before_step(self) -> None:
        """Drop the gradients of a step that is left out: an optimizer leaves parameters without one as they are.

        They stay until here because a GradScaler must see them to lower its scale.
        """
        if self.skips_step:
            self.skips_step = False
            for parameter in self._replica.parameters:
                parameter.grad = None

    def _first_nonfinite(self) -> str | None:
        for name, parameter in zip(self._replica.names, self._replica.parameters, strict=True):
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return name
        return None
