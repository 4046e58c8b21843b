"""Decentralised SGD: weights are averaged with all ranks or with one peer at a time (D-PSGD, arXiv 1705.09056)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from murmura.algorithms.background_exchange import BackgroundExchanges, PendingExchange
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters, Replica
from murmura.algorithms.checks import at_least_one, yes_or_no
from murmura.algorithms.hierarchy import Hierarchy
from murmura.algorithms.mixing import Mixer, segments_of
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.peers import shift_one_peer
from murmura.algorithms.topology import (
    Neighbours,
    Topology,
    column_sums,
    mean_num_peers,
    neighbours_of_all,
    take_topology,
)
from murmura.algorithms.traffic import mean_bytes, payload_bytes
from murmura.algorithms.weights import FlatWeights
from murmura.errors import ConfigError
from murmura.types import Exchanges, PeerSelection, ReduceOp, parse

if TYPE_CHECKING:
    from murmura.transports.base import Transport

MOST_PAIRED = 8
"""On a GPU, ranks of worlds up to this size have a communicator with each peer: each takes memory of the GPU."""


class DecentralizedAlgorithmImpl(AlgorithmImpl):
    """The running state of `DecentralizedAlgorithm` for one model.

    At the beginning of a round that communicates, the weights x_t are copied, and their average A(x_t) is formed in
    the background while forward and backward run on x_t itself. Before the optimizer steps, x becomes A(x_t) where it
    still equals x_t, and x + A(x_t) - x_t where somebody changed it, as a forward changes buffers; the step then
    applies the gradient taken at x_t.
    """

    exchanges = Exchanges.WEIGHTS

    hierarchical: bool
    peer_selection_mode: PeerSelection
    communication_interval: int
    topology: Topology | None

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._channel = process_group.channel("average")
        self._hierarchy = Hierarchy(self._channel, self.hierarchical)
        if self.topology is not None and not self._hierarchy.is_even:
            raise ConfigError(
                f"hierarchical=True puts {list(self._hierarchy.shares)} ranks on the hosts, and the weights of a "
                "topology know nothing of that. Use as many ranks on every host, or hierarchical=False."
            )
        leaders = self._hierarchy.leaders
        if leaders is not None:
            self._mixer = Mixer(leaders)
        if leaders is not None and self.topology is not None:
            self._neighbours(self.topology, leaders, 0)  # refuse it before anything is sent
        self._background = BackgroundExchanges(self._channel)
        self._pending: PendingExchange | None = None
        self._pairs: dict[int, Transport] = {}
        if leaders is not None and self.peer_selection_mode is PeerSelection.SHIFT_ONE:
            is_paired = leaders.gpu is not None and leaders.world_size <= MOST_PAIRED
            self._pairs = pairs_of(leaders) if is_paired else {}

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        self._use(FlatWeights(replica))

    def _use(self, weights: FlatWeights) -> None:
        self._weights = weights
        self._flats = self._weights.allocate(self._channel.allocate)  # x_t, and then A(x_t)
        self._before = [torch.empty_like(flat) for flat in self._flats]  # x_t

    def before_forward(self) -> None:
        number, remainder = divmod(self._replica.round, self.communication_interval)
        if remainder == 0 and self._channel.world_size > 1:
            if self._pending is None:
                self._weights.read(self._before)
                for flat, before in zip(self._flats, self._before, strict=True):
                    flat.copy_(before)
            else:
                self._average_further()
            self._pending = self._background.start(
                f"the average of round {self._replica.round}", self._flats, lambda: self._average(number)
            )

    def _average_further(self) -> None:
        """The average of an earlier round could not be written yet: the next one starts from what it would make."""
        assert self._pending is not None
        self._pending.wait()
        now = [torch.empty_like(before) for before in self._before]
        self._weights.read(now)
        for each, flat, before in zip(now, self._flats, self._before, strict=True):
            flat.copy_(averaged(each, flat, before))
        self._before = now

    def before_step(self, optimizer: Optimizer) -> None:
        self.settle()

    @torch.no_grad()
    def settle(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            averages, befores = self._weights.pairs(self._flats), self._weights.pairs(self._before)
            for (average, weight), (before, _) in zip(averages, befores, strict=True):
                weight.copy_(averaged(weight, average, before))

    def before_collective(self) -> None:
        """Nobody waits for a step: the average is formed in the background."""

    def weights_replaced(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()

    def parameters_changed(self) -> None:
        self.settle()
        self._use(FlatWeights(self._replica))

    def close(self) -> None:
        self._channel.close()

    def _average(self, number: int) -> None:
        for flat in self._flats:
            if self.topology is None and self.peer_selection_mode is PeerSelection.ALL:
                self._hierarchy.reduce(flat, ReduceOp.MEAN)
                continue
            self._hierarchy.reduce_inside(flat, ReduceOp.MEAN)
            if self.topology is None:
                self._mean_with_peer(flat, number)
            elif self._hierarchy.leaders is not None:
                self._mixer.mix(flat, self._neighbours(self.topology, self._hierarchy.leaders, number))
            self._hierarchy.spread(flat)

    def _neighbours(self, topology: Topology, leaders: Transport, number: int) -> Neighbours:
        """The neighbours of this leader in exchange `number`; refused if that would change the mean of the replicas."""
        found = neighbours_of_all(topology, leaders.world_size, number)
        sums = [*column_sums(found), *(sum(each.weights) for each in found)]
        if any(abs(total - 1) > 1e-9 for total in sums):
            raise ConfigError(
                f"topology={topology!r}, exchange {number}: the weights with which a rank receives, and those with "
                "which it hands out, must each sum up to 1; otherwise plain averages would be biased. Correct them, or "
                "use PushSumAlgorithm, which only needs what a rank hands out to sum up to 1."
            )
        return found[leaders.rank]

    def _mean_with_peer(self, flat: Tensor, number: int) -> None:
        """Average with the peer of communication `number`: both come to the same bits."""
        leaders, shares = self._hierarchy.leaders, self._hierarchy.shares
        if leaders is None:
            return
        peer = shift_one_peer(leaders.rank, leaders.world_size, number)
        if peer == leaders.rank:
            return
        own_share, peer_share = shares[leaders.rank], shares[peer]
        if peer in self._pairs and own_share == peer_share:
            self._pairs[peer].all_reduce(flat, ReduceOp.MEAN)
            return
        for segment in segments_of(flat):
            (theirs,) = self._mixer.memory(segment, 1)
            leaders.exchange([(segment, peer)], [(theirs, peer)])
            if own_share == peer_share:
                segment.add_(theirs).div_(2)
            else:
                segment.mul_(own_share).add_(theirs.mul_(peer_share)).div_(own_share + peer_share)


def pairs_of(leaders: Transport) -> dict[int, Transport]:
    """By peer, a group of this rank and it; collective.

    NCCL's messages are cut finely and reach two thirds of the bandwidth of an all-reduce, which sends as much between
    two ranks.
    """
    rank, size = leaders.rank, leaders.world_size
    pairs: dict[int, Transport] = {}
    for step in range(size):  # all meet their peers in one order, so nobody waits in a circle
        peer = shift_one_peer(rank, size, step)
        if peer != rank and peer not in pairs:
            pair = leaders if size == 2 else leaders.split("pair", sorted((rank, peer)))
            assert pair is not None  # this rank is a member
            pairs[peer] = pair
    return pairs


def averaged(x: Tensor, average: Tensor, before: Tensor) -> Tensor:
    """What x becomes: `average`, taken of `before`, and what changed x since then is kept."""
    if not x.is_cuda and torch.equal(x, before):  # the common case in one pass; a GPU would make the host wait
        return average
    return torch.where(x == before, average, x + average - before)


@register_algorithm("decentralized")
@register_algorithm("shift_one", peer_selection_mode="shift_one")
@dataclass(frozen=True)
class DecentralizedAlgorithm(Algorithm):
    """Averages the weights while forward and backward run, then steps on the local gradient.

    With "all" the average is over all ranks; with "shift_one" it is over this rank and one peer, another one each
    time. `topology` is a name or a function of (rank, number of ranks, number of the exchange) that says with whom, and
    with which weights; of what a rank receives, and of what it hands out, they sum up to 1.

    Communicates in every `communication_interval`-th round, beginning with round 0.
    """

    impl: ClassVar[type[AlgorithmImpl]] = DecentralizedAlgorithmImpl

    hierarchical: bool = True
    peer_selection_mode: PeerSelection | str = PeerSelection.ALL
    communication_interval: int = 1
    topology: Topology | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        yes_or_no(hierarchical=self.hierarchical)
        at_least_one(communication_interval=self.communication_interval)
        mode = parse(PeerSelection, self.peer_selection_mode, "peer_selection_mode")
        object.__setattr__(self, "peer_selection_mode", mode)  # a string becomes a member
        if self.topology is not None:
            take_topology(self, self.topology)
            if mode is not PeerSelection.ALL:
                raise ConfigError(f"peer_selection_mode={mode.value!r} says with whom, and topology too. Give one.")

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        if callable(self.topology):
            peers = mean_num_peers(self.topology, num_ranks)
            return peers * payload_bytes(parameters) / self.communication_interval
        if self.peer_selection_mode is PeerSelection.ALL:
            return mean_bytes(parameters, num_ranks) / self.communication_interval
        at_least_one(num_ranks=num_ranks)
        share = (num_ranks - num_ranks % 2) / num_ranks  # with an odd number one rank has no peer
        return share * payload_bytes(parameters) / self.communication_interval

    @property
    def period(self) -> int:
        return self.communication_interval

    @property
    def hides_exchange(self) -> bool:
        return True

    @property
    def keeps_replicas_equal(self) -> bool:
        return False
