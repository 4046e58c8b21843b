"""What to measure on slow links: a frozen order, checked as a whole before any host is made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from torch import nn
from torch.optim import SGD, Optimizer

from murmura.algorithms import algorithm_names
from murmura.benchmarks.models import MLP
from murmura.errors import ConfigError
from murmura.transports.decorators.throttled import parse_rate
from murmura.types import parse

MAX_HOSTS = 16  # every host trains a replica for each contestant, all in the memory of one machine


class NetworkPeer(StrEnum):
    """Whom the algorithms can be measured against."""

    TORCH_DDP = "torch-ddp"  # as it comes, and with its own hooks for fp16 and PowerSGD


@dataclass(frozen=True)
class NarrowLinkMLP(MLP):
    """An MLP that has much to send and little to compute: few rows a rank, and an optimizer without state."""

    batch: int = 4
    layers: int = 10
    width: int = 1000

    @property
    def about(self) -> str:
        return f"MLP: {self.layers} linear layers of width {self.width}, {self.batch} rows a rank, plain SGD"

    def optimizer(self, module: nn.Module) -> Optimizer:
        return SGD(module.parameters(), lr=1e-3)


MODEL = NarrowLinkMLP()  # 10.01 million parameters


def parse_network_peers(names: Iterable[str]) -> tuple[NetworkPeer, ...]:
    """Peers from options that may each hold several, separated by commas; each counts once, in order."""
    entries = [entry.strip() for name in names for entry in name.split(",")]
    return tuple(dict.fromkeys(parse(NetworkPeer, entry, "--against") for entry in entries))


def parse_rates(names: Iterable[str]) -> tuple[str, ...]:
    """Rates from options that may each hold several, separated by commas; each counts once, in order."""
    entries = [entry.strip().lower().replace(" ", "") for name in names for entry in name.split(",")]
    for entry in entries:
        try:
            parse_rate(entry)
        except ConfigError:
            raise ConfigError(f"--rate {entry!r} is no rate of a link. Write a list like 100mbit,1gbit.") from None
    return tuple(dict.fromkeys(entries))


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """An order for the benchmark on slow links.

    Attributes:
        hosts: how many are simulated; each holds one rank.
        rates: of every host's link, in both directions, one measurement each.
        algorithms: by name, who is measured.
        peers: who is measured beside them.
        seconds: how long to measure each rate, all contestants together; a few rounds are measured in any case.
        model: what they train.
    """

    hosts: int = 4
    rates: tuple[str, ...] = ("100mbit", "1gbit")
    algorithms: tuple[str, ...] = tuple(algorithm_names())
    peers: tuple[NetworkPeer, ...] = (NetworkPeer.TORCH_DDP,)
    seconds: float = 120.0
    model: NarrowLinkMLP = MODEL

    def __post_init__(self) -> None:
        faults = []
        if not 2 <= self.hosts <= MAX_HOSTS:
            faults.append(f"{self.hosts} hosts: give from 2, which is the least that communicate, to {MAX_HOSTS}.")
        if not self.rates or not self.algorithms:
            faults.append("there is nothing to measure. Name at least one rate and one algorithm.")
        if not 0 < self.seconds < math.inf:
            faults.append(f"{self.seconds} is not a time to measure for. Give seconds above 0.")
        if faults:
            raise ConfigError("\n".join(faults))

    def command(self) -> str:
        """The command that gives this order."""
        options = {
            "hosts": str(self.hosts),
            "rate": ",".join(self.rates),
            "algorithms": ",".join(self.algorithms),
            "against": ",".join(self.peers),
            "seconds": f"{self.seconds:g}",
        }
        return " ".join(["murmura bench network", *(f"--{name} {value}" for name, value in options.items())])
