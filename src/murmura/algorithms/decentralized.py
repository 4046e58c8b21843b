"""Decentralised SGD: weights are averaged with all ranks or with one peer at a time (D-PSGD, arXiv 1705.09056)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from murmura.algorithms.background import Background, Handover
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Replica
from murmura.algorithms.checks import at_least_one, yes_or_no
from murmura.algorithms.hierarchy import Hierarchy
from murmura.algorithms.peers import shift_one_peer
from murmura.algorithms.weights import FlatWeights
from murmura.types import Exchanges, PeerSelection, ReduceOp, parse

if TYPE_CHECKING:
    from murmura.transports.base import Transport

SEGMENT_BYTES = 64 * 2**20
"""What a peer's weights are received and averaged in, so that no second copy of a large model is needed.

Nothing travels between two segments, so they are long.
"""


class DecentralizedAlgorithmImpl(AlgorithmImpl):
    """The running state of `DecentralizedAlgorithm` for one model.

    At the first forward of a round that communicates, the weights x_t are copied, and their average A(x_t) is formed
    in the background while forward and backward run on x_t itself. Before the optimizer steps, x becomes A(x_t); the
    step then applies the gradient taken at x_t. A buffer b, which the forward itself changes, becomes b + A(b_t) - b_t.
    """

    exchanges = Exchanges.WEIGHTS

    def __init__(
        self,
        process_group: Transport,
        hierarchical: bool = True,
        peer_selection_mode: PeerSelection | str = PeerSelection.ALL,
        communication_interval: int = 1,
    ) -> None:
        super().__init__(process_group)
        at_least_one(communication_interval=communication_interval)
        self._mode = parse(PeerSelection, peer_selection_mode, "peer_selection_mode")
        self._interval = communication_interval
        self._channel = process_group.channel("average")
        self._hierarchy = Hierarchy(self._channel, hierarchical)
        self._background = Background(f"{self._channel.name}-rank{self._channel.rank}")
        self._under_way: Handover | None = None

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        self._weights = FlatWeights(replica)
        self._flats = self._weights.allocate(self._channel)

    def before_forward(self) -> None:
        number, remainder = divmod(self._replica.round, self._interval)
        if remainder == 0 and self._channel.world_size > 1:
            self._weights.read(self._flats)
            self._buffers = [part.clone() for part in self._buffer_parts()]
            self._under_way = self._background.start(
                f"the average of round {self._replica.round}", self._flats, lambda: self._average(number)
            )

    def before_step(self, optimizer: Optimizer) -> None:
        self.settle()

    def settle(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.take_back()
            for part, before in zip(self._buffer_parts(), self._buffers, strict=True):
                part.sub_(before)
            self._weights.renew(self._flats)

    def close(self) -> None:
        self._channel.close()
        self._background.close()

    def _buffer_parts(self) -> list[Tensor]:
        return [flat[count:] for flat, count in zip(self._flats, self._weights.num_parameter_elements, strict=True)]

    def _average(self, number: int) -> None:
        for flat in self._flats:
            if self._mode is PeerSelection.ALL:
                self._hierarchy.reduce(flat, ReduceOp.MEAN)
            else:
                self._hierarchy.reduce_inside(flat, ReduceOp.MEAN)
                self._mean_with_peer(flat, number)
                self._hierarchy.spread(flat)

    def _mean_with_peer(self, flat: Tensor, number: int) -> None:
        """Average with the peer of communication `number`: both come to the same bits."""
        leaders, shares = self._hierarchy.leaders, self._hierarchy.shares
        if leaders is None:
            return
        peer = shift_one_peer(leaders.rank, leaders.world_size, number)
        if peer == leaders.rank:
            return
        own_share, peer_share = shares[leaders.rank], shares[peer]
        incoming = leaders.allocate(min(flat.numel(), SEGMENT_BYTES // flat.element_size()), flat.dtype, flat.device)
        for segment in torch.split(flat, max(1, incoming.numel())):
            theirs = incoming[: segment.numel()]
            leaders.exchange([(segment, peer)], [(theirs, peer)])
            if own_share == peer_share:
                segment.add_(theirs).div_(2)
            else:
                segment.mul_(own_share).add_(theirs.mul_(peer_share)).div_(own_share + peer_share)


@dataclass(frozen=True)
class DecentralizedAlgorithm(Algorithm):
    """Averages the weights while forward and backward run, then steps on the local gradient.

    With "all" the average is over all ranks; with "shift_one" it is over this rank and one peer, another one each
    time. Communicates in every `communication_interval`-th round, beginning with round 0.
    """

    impl: ClassVar[type[AlgorithmImpl]] = DecentralizedAlgorithmImpl

    hierarchical: bool = True
    peer_selection_mode: PeerSelection | str = PeerSelection.ALL
    communication_interval: int = 1

    def __post_init__(self) -> None:
        yes_or_no(hierarchical=self.hierarchical)
        at_least_one(communication_interval=self.communication_interval)
        parse(PeerSelection, self.peer_selection_mode, "peer_selection_mode")
