"""The contract of a gradient aggregator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor


class GradientAggregator(ABC):
    """Turns the gradients of this rank into those that every rank applies; for one thread at a time."""

    @abstractmethod
    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors, in the order given and detached; the inputs stay as they were.

        Every rank calls it with the same number of tensors, of the same shapes and dtypes.
        """
