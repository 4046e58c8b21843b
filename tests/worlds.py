"""The worlds that the contract suites run on, one line each: add a transport here and every suite covers it.

A function that runs on ranks stands at the top level of its module, because processes import it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from murmura import Ticket, Transport, run_world

SECONDS = 40.0  # of any wait, below the time pytest gives a test, so that a hang is told by the rank that hangs


class ExchangeOnly(Transport):
    """A backend that writes only what it must, over another transport: every collective is the inherited one."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.rank, inner.world_size, hosts=inner.hosts, timeout=inner.timeout, name="exchange-only")
        self._inner = inner
        self._splits: list[ExchangeOnly] = []

    def exchange(
        self, sends: Any, recvs: Any, *, async_op: bool = False, timeout: float | None = None
    ) -> Ticket | None:
        self._check_pairs(sends, recvs)
        return self._run("exchange", lambda: self._inner.exchange(sends, recvs, timeout=timeout), async_op)

    def split(self, name: str, ranks: Sequence[int] | None = None) -> ExchangeOnly | None:
        inner = self._inner.split(name, ranks)
        if inner is None:
            return None
        self._splits.append(ExchangeOnly(inner))
        return self._splits[-1]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.close()
            for split in self._splits:
                split.close()
            self._order.close()


@dataclass(frozen=True)
class World:
    """How to start the ranks, and what may be asked of their transport.

    Attributes:
        wrap: makes the transport under test of the one that `run_world` hands to a rank.
        exact: whether sums are made in the library's own order, and so known to the bit.
    """

    name: str
    kind: str
    transport: str | None = None
    wrap: Callable[[Transport], Transport] | None = None
    exact: bool = True

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = SECONDS) -> list[Any]:
        """`run_world`, on the transport under test."""
        options = {"kind": self.kind, "transport": self.transport, "timeout": timeout}
        if self.wrap is None:
            return run_world(fn, world_size, *args, **options)
        return run_world(_run_wrapped, world_size, self.wrap, fn, *args, **options)


def _run_wrapped(inner: Transport, wrap: Callable[[Transport], Transport], fn: Callable[..., Any], *args: Any) -> Any:
    with wrap(inner) as transport:
        return fn(transport, *args)


WORLDS = (
    World("in_process", "threads"),
    World("shared_memory", "processes"),
    World("exchange_only", "threads", wrap=ExchangeOnly),
)
