"""What aggregators over a transport have in common: gradients are packed into flat buffers, compared and averaged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from murmura.aggregation.base import GradientAggregator
from murmura.aggregation.checks import check_place, check_sendable
from murmura.aggregation.layout import FlatBuffers, check_same_layout, clones, layout_of, unpack
from murmura.config import DistributedConfig
from murmura.transports.base import Transport


class FlatMean(GradientAggregator):
    """Averages flat buffers over `transport`, which the caller keeps and closes; a subclass says how."""

    def __init__(self, config: DistributedConfig, transport: Transport) -> None:
        check_place(config, transport)
        self._transport = transport
        self._buffers = FlatBuffers(transport)

    @abstractmethod
    def average_flat(self, flat: Tensor) -> None:
        """Overwrite `flat` with its mean over the ranks, the same bits on each."""

    def average(self, gradients: Sequence[Tensor], call: str) -> list[Tensor]:
        """The mean of the gradients, as new tensors; `call` is what error messages name."""
        gradients = check_sendable(gradients, "gradients", mean=True)
        if self._transport.world_size == 1:
            return clones(gradients)
        layout = layout_of(gradients)
        flats = self._buffers.pack(gradients, layout)
        check_same_layout(self._transport, call, layout)
        for flat in flats:
            self.average_flat(flat)
        return unpack(flats, gradients, layout)
