"""Stochastic gradient push: weights are averaged over directed graphs, without bias (SGP, arXiv 1811.10792)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from murmura.algorithms.after_step import AfterStepImpl
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import NOT_SAVED, check_fields, is_real
from murmura.algorithms.mixing import Mixer
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.topology import (
    Neighbours,
    Topology,
    column_sums,
    mean_num_peers,
    neighbours_of_all,
    take_topology,
)
from murmura.algorithms.traffic import payload_bytes
from murmura.algorithms.weights import FlatWeights
from murmura.errors import ConfigError

if TYPE_CHECKING:
    from murmura.transports.base import Transport


LEAST_WEIGHT = 2.0**-20
"""Below it a step moves z a million times as far as the optimizer meant, and x soon holds no digits of z."""


class PushSumAlgorithmImpl(AfterStepImpl):
    """The running state of `PushSumAlgorithm` for one model.

    Each rank holds x and a number w; the model holds z = x / w, at which gradients are taken. The optimizer's step
    moves z by d, and so x by d. Then rank i takes p_ij x_j from each rank j that sends to it: x_i ← Σ p_ij x_j,
    w_i ← Σ p_ij w_j, where Σ_i p_ij = 1. So Σ x and Σ w = n stay what they are, and z tends to Σ x / n. As a topology
    is a function, every rank knows all w, and none is sent.
    """

    topology: Topology
    _number = 0  # of the next exchange

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._w = [1.0] * process_group.world_size
        self._weights_after(self._neighbours_of_all())  # refuse a topology before anything is sent
        self._mixer = Mixer(process_group)

    def use(self, weights: FlatWeights) -> None:
        self._flats = weights.allocate(self.process_group.allocate)
        self._x = [flat.clone() for flat in self._flats]
        self._w = [1.0] * self.process_group.world_size

    @property
    def weight_in_mean(self) -> float:
        return self._w[self.process_group.rank]

    def is_due(self, number: int) -> bool:
        return True

    @torch.no_grad()
    def communicate(self) -> None:
        size, rank = self.process_group.world_size, self.process_group.rank
        if size == 1:
            return
        found = self._neighbours_of_all()
        after = self._weights_after(found)
        self._number += 1
        self._weights.read(self._flats)
        for flat, x in zip(self._flats, self._x, strict=True):
            x.add_(flat.sub_(x / self._w[rank]))  # z has moved by so much since it was x / w
            flat.copy_(x)
            self._mixer.mix(flat, found[rank])
            x.copy_(flat)
        self._w = after
        for flat in self._flats:
            flat.div_(self._w[rank])
        self._weights.write(self._flats)

    def _neighbours_of_all(self) -> list[Neighbours]:
        """What every rank does in the next exchange; refused unless each hands out all that it holds."""
        found = neighbours_of_all(self.topology, self.process_group.world_size, self._number)
        for rank, total in enumerate(column_sums(found)):
            if abs(total - 1) > 1e-9:
                raise ConfigError(
                    f"topology={self.topology!r}, exchange {self._number}: rank {rank} hands out {total:g} times what "
                    "it holds. Let its weight with itself and with those it sends to sum up to 1."
                )
        return found

    def _weights_after(self, found: Sequence[Neighbours]) -> list[float]:
        """All w after an exchange; refused if one is nearly 0, because z = x / w would overflow."""
        after = [
            each.weights[0] * self._w[index]
            + sum(weight * self._w[peer] for peer, weight in zip(each.receives_from, each.weights[1:], strict=True))
            for index, each in enumerate(found)
        ]
        least = min(range(len(after)), key=after.__getitem__)
        if after[least] < LEAST_WEIGHT:
            raise ConfigError(
                f"topology={self.topology!r}, exchange {self._number}: rank {least} is left with {after[least]:g} of "
                "one share, because it keeps handing out more than it receives. Let every rank keep a share of its "
                "own, and receive from others, directly or over several exchanges, what it hands out."
            )
        return after

    def state_dict(self) -> dict[str, Any]:
        return {"x": self._weights.by_name(self._x), "w": list(self._w), "number": self._number}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_fields(state, x=Mapping, w=list, number=int)
        if len(state["w"]) != self.process_group.world_size:
            raise ConfigError(
                f"this state was saved by {len(state['w'])} ranks, and here are {self.process_group.world_size}: their "
                "weights in the mean do not fit. Go on with as many ranks, or start anew from ddp.average_parameters()."
            )
        if not all(is_real(w) and w > 0 for w in state["w"]) or abs(sum(state["w"]) - len(state["w"])) > 1e-6:
            raise ConfigError(f"'w' in this state is {state['w']}, no shares of {len(state['w'])} ranks. {NOT_SAVED}")
        self._weights.check_by_name(state["x"])

    def take_state(self, state: Mapping[str, Any]) -> None:
        self._w, self._number = list(state["w"]), state["number"]
        for x in self._x:
            x.mul_(self.weight_in_mean)  # of parameters that were frozen then
        self._weights.load_by_name(self._x, state["x"])


@register_algorithm("push_sum")
@dataclass(frozen=True)
class PushSumAlgorithm(Algorithm):
    """Sends a share of the weights to the ranks that `topology` names, after every step, and needs no answer from them.

    `topology` is a name or a function of (rank, number of ranks, number of the exchange), whose weights hand out all
    that a rank holds. Replicas differ; their mean counts each by its `weight_in_mean`.
    """

    impl: ClassVar[type[AlgorithmImpl]] = PushSumAlgorithmImpl

    topology: Topology | str = "one_peer_exponential"

    def __post_init__(self) -> None:
        take_topology(self, self.topology)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        assert callable(self.topology)
        return mean_num_peers(self.topology, num_ranks) * payload_bytes(parameters)

    @property
    def keeps_replicas_equal(self) -> bool:
        return False
