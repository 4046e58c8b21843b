"""Decentralised SGD on a ring with weight differences of eight bits (DCD-PSGD, arXiv 1803.06443)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from murmura.algorithms.after_step import AfterStepImpl
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import at_least_one, check_fields, take_compressor, yes_or_no
from murmura.algorithms.codec_thread import CodecThread, cut
from murmura.algorithms.compressed import wide
from murmura.algorithms.hierarchy import Hierarchy
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.peers import ring_neighbours
from murmura.algorithms.traffic import payload_bytes
from murmura.algorithms.weights import FlatWeights, as_real
from murmura.compressors import Compressor, ErrorFeedback, MinMaxUInt8
from murmura.errors import ConfigError
from murmura.types import ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


PIECE_ELEMENTS = 2**19
"""What is encoded or decoded while other pieces travel."""


class _Piece(NamedTuple):
    """A piece of the weights, of the replicas, and the payloads it travels in."""

    x: Tensor
    w: Tensor
    left: Tensor
    right: Tensor
    own: Tensor
    from_left: Tensor
    from_right: Tensor
    gathered: Tensor | None  # these payloads in rank order, if they are gathered and not exchanged


class LowPrecisionDecentralizedAlgorithmImpl(AfterStepImpl):
    """The running state of `LowPrecisionDecentralizedAlgorithm` for one model.

    w is what the neighbours know of this rank, L and R what it knows of them. z = x + L/3 + R/3 - 5w/3 is the way
    from w to the mean of the three plus the step just taken; its code c goes to both. L += D(c_left),
    R += D(c_right), x ← w + D(c), w ← x: everybody adds the same bits, so a neighbour's replica of me stays equal to
    my w.
    """

    hierarchical: bool
    communication_interval: int
    compressor: Compressor

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._codec = CodecThread()
        self._hierarchy = Hierarchy(process_group, self.hierarchical)
        if not self._hierarchy.is_even:
            raise ConfigError(
                f"hierarchical=True needs equally many ranks on every host, and the hosts have "
                f"{list(self._hierarchy.shares)}: the exchange with two neighbours cannot weight them. Use "
                "hierarchical=False, or DecentralizedAlgorithm, which weights hosts by their ranks."
            )

    def use(self, weights: FlatWeights) -> None:
        self._flats = weights.allocate(self.process_group.allocate)
        leaders = self._hierarchy.leaders
        self._w: list[Tensor] = []
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        if leaders is None or leaders.world_size == 1:
            return
        self._w = [flat.clone() for flat in self._flats]
        self._left = [flat.clone() for flat in self._flats]
        # In a world of two both neighbours are one rank.
        self._right = self._left if leaders.world_size == 2 else [flat.clone() for flat in self._flats]
        replicas = zip(self._flats, self._w, self._left, self._right, strict=True)
        self._pieces = [self._cut(leaders, *map(as_real, each)) for each in replicas]

    def is_due(self, number: int) -> bool:
        return number % self.communication_interval == 0

    @torch.no_grad()
    def start_from_mean(self) -> None:
        means = self._loaded
        shifts = [-flat for flat in means]
        for mean, shift in zip(means, shifts, strict=True):
            self.process_group.all_reduce(mean, ReduceOp.MEAN)
            shift.add_(mean)
        self._weights.add(shifts)  # what a rank has changed since it loaded is kept
        for replica in (self._w, self._left, self._right):
            for own, mean in zip(replica, means, strict=False):
                own.copy_(mean)

    def weights_replaced(self) -> None:
        super().weights_replaced()
        self._loaded = [flat.clone() for flat in self._flats]

    def parameters_changed(self) -> None:
        loaded = self._weights.by_name(self._loaded) if self._is_restarted else {}
        super().parameters_changed()
        if loaded:
            self._loaded = [flat.clone() for flat in self._flats]  # what was frozen until now is as it was loaded
            self._weights.load_by_name(self._loaded, loaded)

    def communicate(self) -> None:
        if self.process_group.world_size == 1:
            return
        self._weights.read(self._flats)
        for index, flat in enumerate(self._flats):
            self._hierarchy.reduce_inside(flat, ReduceOp.MEAN)
            if self._w:
                self._mix(self._pieces[index])
            self._hierarchy.spread(flat)
        self._weights.write(self._flats)

    def _cut(self, leaders: Transport, x: Tensor, w: Tensor, left: Tensor, right: Tensor) -> list[_Piece]:
        pieces = []
        rank, num_ranks = leaders.rank, leaders.world_size
        on_left, on_right = ring_neighbours(rank, num_ranks)
        # Where all are neighbours, NCCL gathers by a ring: as many bytes as by messages, at twice their bandwidth.
        gathers = num_ranks <= 3 and leaders.gpu is not None
        rows = (rank, on_left, on_right) if gathers else (0, 1, 2)
        for start, stop in cut(x.numel(), PIECE_ELEMENTS, self.compressor, x.device):
            size = self.compressor.payload_bytes(stop - start, x.dtype)
            payloads = leaders.allocate((max(rows) + 1) * size, torch.uint8, x.device).view(-1, size)
            own, from_left, from_right = (payloads[row] for row in rows)
            replicas = x[start:stop], w[start:stop], left[start:stop], right[start:stop]
            pieces.append(_Piece(*replicas, own, from_left, from_right, payloads.view(-1) if gathers else None))
        return pieces

    def _mix(self, pieces: Sequence[_Piece]) -> None:
        """One exchange with the neighbours on the ring; overwrites all that the pieces hold."""
        start = partial(self._codec.start, num_pieces=len(pieces))
        encoded = [start(partial(self._encode, piece)) for piece in pieces]
        decoded = []
        for piece, future in zip(pieces, encoded, strict=True):
            future.result()
            self._exchange(piece)
            decoded.append(start(partial(self._decode, piece)))
        for future in decoded:
            future.result()

    def _encode(self, piece: _Piece) -> None:
        z = piece.x.to(wide(piece.x.dtype))
        z.add_(piece.left, alpha=1 / 3).add_(piece.right, alpha=1 / 3).sub_(piece.w, alpha=5 / 3)
        self.compressor.compress(z, piece.own)

    def _exchange(self, piece: _Piece) -> None:
        leaders = self._hierarchy.leaders
        assert leaders is not None
        on_left, on_right = ring_neighbours(leaders.rank, leaders.world_size)
        if piece.gathered is not None:
            leaders.all_gather_into(piece.gathered, piece.own)
        elif on_left == on_right:
            leaders.exchange([(piece.own, on_left)], [(piece.from_left, on_left)])
        else:
            sends = [(piece.own, on_left), (piece.own, on_right)]
            leaders.exchange(sends, [(piece.from_left, on_left), (piece.from_right, on_right)])

    def _decode(self, piece: _Piece) -> None:
        if self._right is not self._left:  # not in a world of two
            self.compressor.decompress_add(piece.from_right, piece.right)
        self.compressor.decompress_add(piece.from_left, piece.left)
        self.compressor.decompress_add(piece.own, piece.w)
        piece.x.copy_(piece.w)

    def close(self) -> None:
        self._codec.close()

    def replicas(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """w, L and R as flat tensors; empty on a rank that does not exchange."""
        return self._w, self._left, self._right

    def state_dict(self) -> dict[str, Any]:
        leaders = self._hierarchy.leaders
        return {
            "ring": None if leaders is None else (leaders.rank, leaders.world_size),
            "w": self._weights.by_name(self._w) if self._w else {},
            "left": self._weights.by_name(self._left) if self._w else {},
            "right": self._weights.by_name(self._right) if self._w else {},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_fields(state, ring=(list, tuple, NoneType), w=Mapping, left=Mapping, right=Mapping)
        leaders = self._hierarchy.leaders
        place = None if leaders is None else (leaders.rank, leaders.world_size)
        saved_place = None if state["ring"] is None else tuple(state["ring"])
        if saved_place != place:
            raise ConfigError(
                f"this state was saved at place {saved_place} (rank, size) of the ring, and here it is {place}: it "
                "holds the weights of two neighbours that are not this rank's neighbours now. Resume with the same "
                "ranks in the same places, or restart the algorithm from averaged weights (ddp.average_parameters())."
            )
        for saved in (state["w"], state["left"], state["right"]):
            self._weights.check_by_name(saved)

    def take_state(self, state: Mapping[str, Any]) -> None:
        if self._w:
            for own, saved in ((self._w, state["w"]), (self._left, state["left"]), (self._right, state["right"])):
                self._weights.load_by_name(own, saved)


@register_algorithm("low_precision_decentralized")
@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Sends the compressed change of the weights to both ring neighbours after the optimizer's step.

    Communicates after every `communication_interval`-th round, beginning with round 0.
    """

    impl: ClassVar[type[AlgorithmImpl]] = LowPrecisionDecentralizedAlgorithmImpl

    hierarchical: bool = True
    communication_interval: int = 1
    compressor: Compressor | str = field(default_factory=MinMaxUInt8, kw_only=True)

    def __post_init__(self) -> None:
        yes_or_no(hierarchical=self.hierarchical)
        at_least_one(communication_interval=self.communication_interval)
        take_compressor(self, self.compressor)
        if isinstance(self.compressor, ErrorFeedback):
            raise ConfigError(
                "LowPrecisionDecentralizedAlgorithm sends the difference to what its neighbours know, so what one "
                "message loses is in the next already; with ErrorFeedback it would count twice. Give the inner "
                "compressor itself."
            )

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        at_least_one(num_ranks=num_ranks)
        num_neighbours = min(2, num_ranks - 1)
        return num_neighbours * payload_bytes(parameters, self.compressor) / self.communication_interval

    @property
    def period(self) -> int:
        return self.communication_interval

    @property
    def keeps_replicas_equal(self) -> bool:
        return False
