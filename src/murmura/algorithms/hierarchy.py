"""Exchanges in two levels: inside each host, and between the hosts' leaders."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.algorithms.checks import yes_or_no
from murmura.collectives.reduction import divide
from murmura.transports.base import Transport, check_transport
from murmura.transports.host import leaders_of, members_of
from murmura.types import ReduceOp


class Hierarchy:
    """Who exchanges with whom on `transport`.

    If `by_host`, and there are several hosts with more than one rank on some, values are reduced inside each host, only
    the first rank of each host (its leader) exchanges with other hosts, and the result is broadcast inside the hosts.
    Otherwise every rank is a leader and nothing is done inside hosts.

    Attributes:
        leaders: the transport between leaders; None on a rank that is not one.
        shares: shares[k] is the number of ranks on the host of leader k.
    """

    def __init__(self, transport: Transport, by_host: bool) -> None:
        check_transport(transport)
        yes_or_no(by_host=by_host)
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
        """Whether all leaders' hosts have equally many ranks."""
        return len(set(self.shares)) == 1

    def reduce(self, flat: Tensor, op: ReduceOp) -> None:
        """Overwrite `flat` with the sum or mean over all ranks, the same bits on each."""
        if self._inside is None:
            self._transport.all_reduce_own(flat, op)
            return
        self.reduce_inside(flat, op)
        self.reduce_between(flat, op)
        self.spread(flat)

    def reduce_inside(self, flat: Tensor, op: ReduceOp) -> None:
        """Overwrite a leader's `flat` with the sum or mean over its host; the others keep theirs."""
        if self._inside is not None:
            self._inside.reduce(flat, 0, op)

    def reduce_between(self, flat: Tensor, op: ReduceOp) -> None:
        """Overwrite the leaders' `flat` with their sum, or their mean weighted by the number of ranks on each host."""
        if self.leaders is None:
            return
        if op is ReduceOp.SUM or self.is_even:
            self.leaders.all_reduce(flat, op)
        else:
            flat.mul_(self.shares[self.leaders.rank])
            self.leaders.all_reduce(flat, ReduceOp.SUM)
            divide(flat, sum(self.shares))

    def spread(self, flat: Tensor) -> None:
        """Overwrite `flat` with that of the host's leader."""
        if self._inside is not None:
            self._inside.broadcast(flat, 0)
