"""Hosts and slow networks simulated on one machine.

`__all__` holds what is built; the other names are declared signatures whose use raises UsageError.
"""

from __future__ import annotations

from murmura.errors import not_built

__all__: list[str] = []


class Hosts:
    """`n` network namespaces joined by links of `rate`, for example "100mbit"."""

    def __init__(self, n: int, rate: str) -> None:
        not_built("murmura.lab.Hosts")
