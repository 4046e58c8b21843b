"""Ranks by host: the mean inside each host, an exchange between the hosts' leaders, and the result for everyone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.transports.base import Transport
from murmura.transports.host import leaders_of, members_of
from murmura.types import ReduceOp


class Hierarchy:
    """Who exchanges with whom on `transport`.

    If `by_host`, and there are several hosts with more than one rank on some: the leaders, the first rank of each
    host. Otherwise every rank leads itself, and what is done inside hosts is nothing.

    Attributes:
        leaders: the transport of those that exchange; None on a rank that does not.
        shares: shares[k] is the number of ranks that leader k stands for.
    """

    def __init__(self, transport: Transport, by_host: bool) -> None:
        leaders = leaders_of(transport.hosts)
        self._transport = transport
        self._inside: Transport | None = None
        if by_host and 1 < len(leaders) < transport.world_size:
            hosts = [members_of(transport.hosts, leader) for leader in leaders]
            for ranks in hosts:  # every rank calls for every host: process groups want that
                inside = transport.split("host", ranks)
                self._inside = inside if inside is not None else self._inside
            self.leaders = transport.split("leaders", leaders)
            self.shares: Sequence[int] = [len(ranks) for ranks in hosts]
        else:
            self.leaders = transport
            self.shares = [1] * transport.world_size

    @property
    def is_even(self) -> bool:
        """Whether all leaders stand for equally many ranks."""
        return len(set(self.shares)) == 1

    def reduce(self, flat: Tensor, op: ReduceOp) -> None:
        """Overwrite `flat` with the sum or mean over all ranks, the same bits on each."""
        self.reduce_inside(flat, op)
        self.reduce_between(flat, op)
        self.spread(flat)

    def reduce_inside(self, flat: Tensor, op: ReduceOp) -> None:
        """Overwrite a leader's `flat` with the sum or mean over its host; the others keep theirs."""
        if self._inside is not None:
            self._inside.reduce(flat, 0, op)

    def reduce_between(self, flat: Tensor, op: ReduceOp) -> None:
        """Overwrite the leaders' `flat` with their sum, or their mean weighted by the ranks each stands for."""
        if self.leaders is None:
            return
        if op is ReduceOp.SUM or self.is_even:
            self.leaders.all_reduce(flat, op)
        else:
            flat.mul_(self.shares[self.leaders.rank])
            self.leaders.all_reduce(flat, ReduceOp.SUM)
            flat.div_(sum(self.shares))

    def spread(self, flat: Tensor) -> None:
        """Overwrite `flat` with that of the host's leader."""
        if self._inside is not None:
            self._inside.broadcast(flat, 0)
