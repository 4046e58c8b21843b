"""A transport for several hosts: shared memory inside a host, process groups between the hosts' leaders."""

from __future__ import annotations

from typing import Any

from murmura.errors import not_built


class HierarchicalTransport:
    """Made by `connect`; its constructor is no promise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        not_built("murmura.HierarchicalTransport")
