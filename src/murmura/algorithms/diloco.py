"""Ranks train alone; an outer optimizer moves the common weights (DiLoCo, arXiv 2311.08105)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from murmura.algorithms.after_step import AfterStepImpl
from murmura.algorithms.background_exchange import BackgroundExchanges, PendingExchange
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import NOT_SAVED, at_least_one, check_fields, is_real, take_compressor, yes_or_no
from murmura.algorithms.codec_thread import CodecThread
from murmura.algorithms.compressed import CompressedMean, Residual, check_residuals, has_residuals, wide
from murmura.algorithms.means import compressed_mean
from murmura.algorithms.names import LOCAL_STEPS, register_algorithm
from murmura.algorithms.traffic import mean_bytes
from murmura.algorithms.weights import FlatWeights, Piece, as_real
from murmura.buckets.flat import FlatTensors, plain_memory
from murmura.collectives.chunks import chunk_bounds
from murmura.compressors import Compressor
from murmura.errors import ConfigError, MurmuraError, PeerTimeout
from murmura.types import ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport

log = logging.getLogger("murmura")


class _Part(NamedTuple):
    """What a fragment has of one flat; the last fragment has the buffers behind its parameters."""

    theta: Tensor
    velocity: Tensor
    pieces: list[Piece]  # of parameters
    buffers: list[Piece]
    stage: Tensor  # of their length: θ - x and its mean, then buffers and their mean; shared by all fragments
    mean: CompressedMean | None

    @property
    def change(self) -> Tensor:
        return self.stage[: self.theta.numel()]

    @property
    def news(self) -> list[tuple[list[Piece], Tensor]]:
        """What pieces get after the exchange."""
        both = ((self.pieces, self.theta), (self.buffers, self.stage[self.theta.numel() :]))
        return [each for each in both if each[0]]


@dataclass
class _Arrival:
    """A fragment between its exchange and the moment at which weights take it over."""

    fragment: int
    round: int
    parts: list[tuple[list[Piece], Tensor]]
    pending: PendingExchange | None = None


class DiLoCoAlgorithmImpl(AfterStepImpl):
    """The running state of `DiLoCoAlgorithm`, and of `StreamingDiLoCoAlgorithm`, for one model.

    θ are the common weights, the same bits on every rank, and x a rank's own. The parameters, end to end, are cut into
    `fragments` of equal length, each of which takes its turn once in `interval` rounds: d = mean(θ - x), v ← μ v + d,
    θ ← θ - lr (d + μ v), and `overlap` rounds later x ← α x + (1 - α) θ. Until then training goes on, and only one
    fragment travels; the last arrives after every `interval`-th round. Buffers go with it and are averaged plainly:
    momentum would carry a variance below zero.
    """

    interval: int
    outer_lr: float
    outer_momentum: float
    compressor: Compressor | None
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._codec = CodecThread()
        self._channel = process_group.channel("fragments") if self.overlap else process_group
        self._background = BackgroundExchanges(self._channel)
        self._arrival: _Arrival | None = None
        ends = [(index + 1) * self.interval // self.fragments for index in range(self.fragments)]
        self._turns = {(end - self.overlap) % self.interval: index for index, end in enumerate(ends)}

    def use(self, weights: FlatWeights) -> None:
        self._await_exchange()
        self._arrival = None
        counts, flats = weights.num_parameter_elements, weights.allocate(plain_memory)
        self._theta = [flat[:count].clone() for flat, count in zip(flats, counts, strict=True)]
        self._velocity = [torch.zeros_like(each) for each in self._theta]
        bounds = [[chunk_bounds(count, self.fragments, index) for index in range(self.fragments)] for count in counts]
        # The first fragment is the longest, but for the last one where there are buffers behind it.
        longest = [max(each[0][1], flat.numel() - each[-1][0]) for each, flat in zip(bounds, flats, strict=True)]
        stages = [
            self._channel.allocate(numel, flat.dtype, flat.device) for numel, flat in zip(longest, flats, strict=True)
        ]
        self._fragments = [
            [self._part(weights, number, stages[number], *bounds[number][index], index) for number in range(len(flats))]
            for index in range(self.fragments)
        ]

    def _part(self, weights: FlatWeights, number: int, stage: Tensor, start: int, stop: int, index: int) -> _Part:
        end = weights.numels[number] if index == self.fragments - 1 else stop
        theta, velocity = self._theta[number][start:stop], self._velocity[number][start:stop]
        mean = None
        if self.compressor is not None and self._channel.world_size > 1 and theta.numel():
            mean = compressed_mean(self._channel, as_real(theta), self.compressor, self._codec)
        pieces, buffers = weights.pieces(number, start, stop), weights.pieces(number, stop, end)
        return _Part(theta, velocity, pieces, buffers, stage[: end - start], mean)

    # When

    def _fragment_after(self, number: int) -> int | None:
        """The fragment whose exchange begins after round `number`."""
        return self._turns.get((number + 1) % self.interval)

    def is_due(self, number: int) -> bool:
        return self._fragment_after(number) is not None or self._fragment_after(number - self.overlap) is not None

    def waits_after(self, number: int) -> bool:
        return self.overlap == 0 or self.averages_moments_after(number)

    def channel_beside(self, number: int) -> Transport | None:
        return None if self._fragment_after(number) is None else self._channel

    def averages_moments_after(self, number: int) -> bool:
        return self.average_moments and (number + 1) % self.interval == 0

    # What

    @torch.no_grad()
    def start_from_mean(self) -> None:
        shifts = []
        for theta in self._theta:
            mean = theta.clone()
            self.process_group.all_reduce(mean, ReduceOp.MEAN)
            shifts.append(mean - theta)
            theta.copy_(mean)
        self._weights.add(self._as_flats(shifts))  # what a rank has changed since it loaded is kept

    def communicate(self) -> None:
        if self._arrival is not None:  # whatever is due next after it was sent, its time is over
            self._take_over()
        index = self._fragment_after(self.due_round)
        if index is None:
            return
        parts = [part for part in self._fragments[index] if part.stage.numel()]
        for part in parts:
            self._weights.read_changes([*part.pieces, *part.buffers], part.theta, part.stage)
        self._arrival = _Arrival(index, self.due_round, [each for part in parts for each in part.news])
        if self.overlap:
            tensors = [each for part in parts for each in (part.stage, part.theta, part.velocity)]
            what = f"the exchange of fragment {index} after round {self.due_round}"
            votes_on = None if self.has_voted or self._channel.world_size == 1 else self.due_round

            def exchange() -> None:
                if votes_on is not None:
                    self.vote(self._channel, votes_on, True)
                self._outer_step(parts)

            self._arrival.pending = self._background.start(what, tensors, exchange)
        else:
            self._outer_step(parts)
            self._take_over()

    @torch.no_grad()
    def _outer_step(self, parts: Sequence[_Part]) -> None:
        """Let θ and the buffers in the stages, which hold this rank's changes, become those of all ranks."""
        for part in parts:
            whole = part.stage
            if part.mean is not None:
                part.mean(as_real(part.change))
                whole = part.stage[part.theta.numel() :]  # buffers beside small changes would cost them bits
            if whole.numel():
                self._channel.all_reduce(whole, ReduceOp.MEAN)
        for part in parts:
            part.velocity.mul_(self.outer_momentum).add_(part.change)
            part.theta.sub_(part.change.add_(part.velocity, alpha=self.outer_momentum), alpha=self.outer_lr)

    def _take_over(self) -> None:
        """Let the weights take over the fragment that has arrived, or is about to."""
        self._await_exchange()
        assert self._arrival is not None
        for pieces, stage in self._arrival.parts:
            self._weights.mix_pieces(pieces, stage, self.alpha)
        self._arrival = None

    def _await_exchange(self) -> None:
        """Wait until no fragment travels: θ, v and the stages may be used."""
        arrival = self._arrival
        if arrival is None or arrival.pending is None:
            return
        try:
            arrival.pending.wait()
        except MurmuraError as error:
            error.add_note(
                f"This ended the exchange of fragment {arrival.fragment} of {self.fragments} (from 0), which began on "
                f"rank {self.process_group.reporter.own} after round {arrival.round}."
            )
            raise
        arrival.pending = None

    def close(self) -> None:
        if self._arrival is not None and sys.exc_info()[0] is None:  # otherwise the others may never come
            try:
                self._await_exchange()
            except PeerTimeout as error:  # closing must work: no error, but not silence either
                log.error("the exchange under way had failed at the end: %s", error)
            except MurmuraError:
                pass  # nobody needs its outcome: they may have left
        self._arrival = None
        if self._channel is not self.process_group:
            self._channel.close()
        self._codec.close()

    # Other parameters

    def parameters_changed(self) -> None:
        self._await_exchange()
        residuals = self._residuals()
        super().parameters_changed()
        self._set_residuals(*residuals)

    def _residuals(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The residual of each parameter, on this rank and in the means."""
        if not self._is_compressed:
            return {}, {}
        own, mean = [], []
        for parts, theta in zip(zip(*self._fragments, strict=True), self._theta, strict=True):
            found = [
                part.mean.residuals([""], [as_real(part.theta).numel()])[""] for part in parts if part.mean is not None
            ]
            own.append(_like(theta, [each.own for each in found]))
            mean.append(_like(theta, [each.mean for each in found]))
        return self._by_name(own), self._by_name(mean)

    def _set_residuals(self, own: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> None:
        if not self._is_compressed:
            return
        own_flats = self._as_flats([torch.zeros_like(theta) for theta in self._theta])
        mean_flats = self._as_flats([torch.zeros_like(theta, dtype=wide(theta.dtype)) for theta in self._theta])
        self._weights.load_by_name(own_flats, own)
        self._weights.load_by_name(mean_flats, mean)
        for parts, own_flat, mean_flat in zip(zip(*self._fragments, strict=True), own_flats, mean_flats, strict=True):
            start = 0
            for part in parts:
                stop = start + part.theta.numel()
                if part.mean is not None:
                    residual = Residual(as_real(own_flat[start:stop]), as_real(mean_flat[start:stop]))
                    part.mean.set_residuals([""], [residual.own.numel()], {"": residual})
                start = stop

    @property
    def _is_compressed(self) -> bool:
        return bool(self._means())

    def _means(self) -> list[CompressedMean]:
        return [part.mean for fragment in self._fragments for part in fragment if part.mean is not None]

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Waits for the fragment that travels; its outcome is part of the state, and weights take it over in time."""
        self._await_exchange()
        arrival = self._arrival
        return {
            "theta": self._by_name(self._theta),
            "velocity": self._by_name(self._velocity),
            "compressed": [mean.state_dict() for mean in self._means()],
            "arrival": None
            if arrival is None
            else {
                "fragment": arrival.fragment,
                "round": arrival.round,
                "parts": [([tuple(each) for each in pieces], stage.clone()) for pieces, stage in arrival.parts],
            },
        }

    def take_state(self, state: Mapping[str, Any]) -> None:
        self._await_exchange()
        for own, saved in ((self._theta, state["theta"]), (self._velocity, state["velocity"])):
            flats = self._as_flats(own)
            self._weights.load_by_name(flats, saved)
            for each, flat in zip(own, flats, strict=True):
                each.copy_(flat[: each.numel()])
        for mean, saved in zip(self._means(), state["compressed"], strict=False):
            mean.load_state_dict(saved)
        arrival = state.get("arrival")
        if arrival is not None:
            # What has been frozen since takes part no more, and neither does what has come for it.
            parts = [
                self._weights.held_pieces([Piece(*each) for each in pieces], stage)
                for pieces, stage in arrival["parts"]
            ]
            arrival = _Arrival(arrival["fragment"], arrival["round"], [part for part in parts if part[0]])
        self._arrival = arrival

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_fields(state, theta=Mapping, velocity=Mapping, compressed=list)
        for saved in (state["theta"], state["velocity"]):
            self._weights.check_by_name(saved)
        self._check_arrival(state.get("arrival"))
        for each in state["compressed"]:
            check_residuals(each, self.compressor)
        if any(map(has_residuals, state["compressed"])):
            self._check_same_cut(state)
            for each in state["compressed"]:
                check_residuals(each, self.compressor, self._channel.world_size)

    def _check_arrival(self, arrival: Mapping[str, Any] | None) -> None:
        """Refuse a fragment under way that is not of this model."""
        if arrival is None:
            return
        check_fields(arrival, "'arrival' in this state", fragment=int, round=int, parts=list)
        try:
            for pieces, values in arrival["parts"]:
                self._weights.check_pieces(pieces, values)
        except (TypeError, ValueError, AttributeError) as error:  # what was unpacked is no such list
            raise ConfigError(f"'parts' of 'arrival' in this state cannot be read: {error}. {NOT_SAVED}") from error

    def _check_same_cut(self, state: Mapping[str, Any]) -> None:
        """Refuse a state with other fragments than its parameters have here: residuals belong to fragments."""
        parameters = dict(zip(self._replica.names, self._replica.parameters, strict=True))
        numels = FlatTensors([parameters[name] for name in state["theta"]]).numels
        is_compressed = self.compressor is not None and self._channel.world_size > 1
        saved, here = len(state["compressed"]), sum(min(self.fragments, numel) for numel in numels if is_compressed)
        if saved != here:
            raise ConfigError(
                f"this state holds the compression residuals of {saved} parts, and here are {here}: one for each "
                "fragment and dtype, none without a compressor or in a world of one. Resume with the same options, or "
                "leave the algorithm's state out."
            )

    def _by_name(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        named = self._weights.by_name(self._as_flats(values))
        return {name: named[name] for names in self._weights.parameters_of for name in names}

    def _as_flats(self, values: Sequence[Tensor]) -> list[Tensor]:
        """`values`, which are of the parameters, at their place in flats that end with the buffers."""
        flats = []
        for group, each in zip(self._weights.groups, values, strict=True):
            flat = torch.zeros(group.numel, dtype=each.dtype, device=group.device)
            flat[: each.numel()] = each
            flats.append(flat)
        return flats


def _like(theta: Tensor, reals: list[Tensor]) -> Tensor:
    """`reals` end to end, as complex numbers if `theta` is complex."""
    if not reals:
        return theta
    return torch.view_as_complex(torch.cat(reals).view(-1, 2)) if theta.is_complex() else torch.cat(reals)


@register_algorithm("diloco", interval=LOCAL_STEPS)
@dataclass(frozen=True)
class DiLoCoAlgorithm(Algorithm):
    """Applies Nesterov momentum to the mean change of the weights after every `interval`-th round.

    `compressor` sends that change in fewer bytes. `average_moments` averages what the inner optimizers remember, such
    as Adam's moments, as well.
    """

    impl: ClassVar[type[AlgorithmImpl]] = DiLoCoAlgorithmImpl

    interval: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    compressor: Compressor | str | None = field(default=None, kw_only=True)
    average_moments: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        lr, momentum = self.outer_lr, self.outer_momentum
        at_least_one(interval=self.interval)
        yes_or_no(average_moments=self.average_moments)
        if not is_real(lr) or not lr > 0 or not is_real(momentum) or not 0 <= momentum < 1:
            raise ConfigError(
                f"outer_lr={lr!r} must be a number above 0, and outer_momentum={momentum!r} one from 0 up to below 1."
            )
        if self.compressor is not None:
            take_compressor(self, self.compressor)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        moments = 2 * mean_bytes(parameters, num_ranks) if self.average_moments else 0
        return (mean_bytes(parameters, num_ranks, self.compressor) + moments) / self.interval

    @property
    def period(self) -> int:
        return self.interval
