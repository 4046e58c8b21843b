"""Transports around transports: to see what happens, to break it, and to slow it down. They compose."""

from murmura.transports.decorators.faulty import FaultyTransport
from murmura.transports.decorators.throttled import ThrottledTransport
from murmura.transports.decorators.traced import TracedTransport

__all__ = ["FaultyTransport", "ThrottledTransport", "TracedTransport"]
