"""Transports that wrap a transport: to watch it, to break it, to slow it down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from murmura.errors import not_built

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class TracedTransport:
    """Records every operation of `transport`, with its peers, bytes and seconds."""

    def __init__(self, transport: Transport) -> None:
        not_built("murmura.TracedTransport")


class FaultyTransport:
    """Lets `fault` happen on `rank` in the given `operation`; all else goes to `transport` untouched."""

    def __init__(self, transport: Transport, fault: Any, *, rank: int, operation: Any) -> None:
        not_built("murmura.FaultyTransport")


class ThrottledTransport:
    """Makes `transport` as slow as a link of `bandwidth`, with `latency` seconds for each message."""

    def __init__(self, transport: Transport, bandwidth: str = "100mbit", latency: float = 0.0) -> None:
        not_built("murmura.ThrottledTransport")
