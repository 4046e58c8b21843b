"""Who sends to whom in each exchange: pure functions, so that all ranks come to the same answer without a message."""

from __future__ import annotations

import math
import operator
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from murmura.algorithms.checks import at_least_one
from murmura.algorithms.peers import ring_neighbours, shift_one_peer
from murmura.errors import ConfigError
from murmura.registry import Registry

COUNTED_EXCHANGES = 64
"""Over how many exchanges the peers of a topology are counted."""


class Neighbours(NamedTuple):
    """The peers of one rank in an exchange: its x becomes weights[0] x + Σ weights[1 + i] (x of receives_from[i])."""

    sends_to: Sequence[int]
    receives_from: Sequence[int]
    weights: Sequence[float]


Topology: TypeAlias = Callable[[int, int, int], Neighbours]
"""A function of (rank, number of ranks, number of the exchange), the same on every rank."""

_REGISTRY: Registry[Any] = Registry(Callable, "topology", "murmura.topologies")  # type: ignore[arg-type]

register_topology = _REGISTRY.register
"""A decorator that gives a topology a name: a class whose objects are called, or a function that makes a `Topology`.

A package announces its topologies as entry points of the group `murmura.topologies`.
"""


def topology_names() -> list[str]:
    """The names that `topology_named` knows."""
    return _REGISTRY.names()


def topology_named(name: str) -> Topology:
    """The topology of that name, with options: "random_matching:seed=3"."""
    topology: Topology = _REGISTRY.make(name)
    return topology


def even_shares(sends_to: Sequence[int], receives_from: Sequence[int]) -> Neighbours:
    """The neighbours of a rank where every rank has as many: all shares are equal."""
    return Neighbours(sends_to, receives_from, [1 / (1 + len(receives_from))] * (1 + len(receives_from)))


@register_topology("all")
@dataclass(frozen=True)
class All:
    """Everybody with everybody: the mean."""

    def __call__(self, rank: int, size: int, number: int) -> Neighbours:
        others = [each for each in range(size) if each != rank]
        return even_shares(others, others)


@register_topology("shift_one")
@dataclass(frozen=True)
class ShiftOne:
    """Pairs of two halves that shift against each other, as in `DecentralizedAlgorithm`."""

    def __call__(self, rank: int, size: int, number: int) -> Neighbours:
        peers = sorted({shift_one_peer(rank, size, number)} - {rank})
        return even_shares(peers, peers)


@register_topology("ring")
@dataclass(frozen=True)
class Ring:
    """The neighbours on both sides."""

    def __call__(self, rank: int, size: int, number: int) -> Neighbours:
        neighbours = sorted({*ring_neighbours(rank, size)} - {rank})
        return even_shares(neighbours, neighbours)


@register_topology("one_peer_exponential")
@dataclass(frozen=True)
class OnePeerExponential:
    """To the rank 1, 2, 4, ... places ahead, another one each time: in log2 n exchanges news reaches everybody."""

    def __call__(self, rank: int, size: int, number: int) -> Neighbours:
        hops = _hops(size)
        if not hops:
            return even_shares([], [])
        hop = hops[number % len(hops)]
        return even_shares([(rank + hop) % size], [(rank - hop) % size])


@register_topology("exponential")
@dataclass(frozen=True)
class Exponential:
    """To all ranks that are 1, 2, 4, ... places ahead, each time."""

    def __call__(self, rank: int, size: int, number: int) -> Neighbours:
        hops = _hops(size)
        return even_shares([(rank + hop) % size for hop in hops], [(rank - hop) % size for hop in hops])


@register_topology("random_matching")
@dataclass(frozen=True)
class RandomMatching:
    """Pairs that are drawn anew each time; one rank sits out if their number is odd."""

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ConfigError(f"seed={self.seed!r} must be a whole number.")

    def __call__(self, rank: int, size: int, number: int) -> Neighbours:
        order = list(range(size))
        random.Random(f"{self.seed} {number}").shuffle(order)
        place = order.index(rank) ^ 1
        peers = [order[place]] if place < size else []
        return even_shares(peers, peers)


def _hops(size: int) -> list[int]:
    """The powers of two below the number of ranks."""
    return [2**power for power in range(math.ceil(math.log2(size)))] if size > 1 else []


def neighbours_of_all(topology: Topology, size: int, number: int) -> list[Neighbours]:
    """What every rank does in exchange `number`; `ConfigError` where two ranks would wait for each other in vain."""
    found = []
    where = f"topology={topology!r}, exchange {number} of {size} ranks"
    for rank in range(size):
        answer = topology(rank, size, number)
        try:
            sends_to, receives_from, weights = answer
            sources = [operator.index(peer) for peer in receives_from]
            found.append(Neighbours([operator.index(peer) for peer in sends_to], sources, [float(w) for w in weights]))
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: for rank {rank} it returned {answer!r}. Return Neighbours.") from None
    sent = {(rank, peer) for rank, each in enumerate(found) for peer in each.sends_to}
    received = {(peer, rank) for rank, each in enumerate(found) for peer in each.receives_from}
    if sent != received:
        src, dst = min(sent ^ received)
        verbs = ("sends to", "does not expect it") if (src, dst) in sent else ("does not send to", "expects it")
        raise ConfigError(f"{where}: rank {src} {verbs[0]} rank {dst}, which {verbs[1]}. Let both sides agree.")
    for rank, each in enumerate(found):
        for peers in (each.sends_to, each.receives_from):
            if not set(peers) <= set(range(size)) - {rank} or len(set(peers)) < len(peers):
                known = f"other ranks, from 0 to {size - 1}, once each"
                raise ConfigError(f"{where}: rank {rank} has the peers {list(peers)}. Name {known}.")
        weights = list(each.weights)
        if len(weights) != 1 + len(each.receives_from) or not all(0 <= weight <= 1 for weight in weights):
            raise ConfigError(
                f"{where}: rank {rank} has the weights {weights}. Give one for itself and one for each rank that it "
                "receives from, all from 0 to 1."
            )
    return found


def column_sums(found: Sequence[Neighbours]) -> list[float]:
    """The sum of the weights that all ranks give to each rank; 1 everywhere if an exchange keeps the sum over ranks."""
    sums = [each.weights[0] for each in found]
    for each in found:
        for peer, weight in zip(each.receives_from, each.weights[1:], strict=True):
            sums[peer] += weight
    return sums


def mean_num_peers(topology: Topology, num_ranks: int) -> float:
    """How many ranks a rank sends to in an exchange: the mean over ranks and exchanges."""
    at_least_one(num_ranks=num_ranks)
    exchanges = (neighbours_of_all(topology, num_ranks, number) for number in range(COUNTED_EXCHANGES))
    counts = [len(each.sends_to) for exchange in exchanges for each in exchange]
    return statistics.fmean(counts)


def take_topology(choices: object, topology: object) -> None:
    """Set the field `topology` of `choices`, a frozen dataclass, to a function; `topology` may be its name."""
    if isinstance(topology, str):
        object.__setattr__(choices, "topology", topology_named(topology))
    elif not callable(topology):
        raise ConfigError(f"topology={topology!r} is no topology: give a name, or a function of (rank, size, number).")
