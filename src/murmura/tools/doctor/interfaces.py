"""List the network interfaces of this process's network namespace."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

SYS_NET = Path("/sys/class/net")


class Scope(StrEnum):
    """From where an address can be reached."""

    LOOPBACK = "loopback"  # from this host
    LINK_LOCAL = "link-local"  # from the same link
    PRIVATE = "private"  # from a network that does not belong to the internet
    PUBLIC = "public"  # from anywhere


def scope_of(address: str) -> Scope:
    found = ipaddress.ip_address(address.partition("%")[0])
    if found.is_loopback:
        return Scope.LOOPBACK
    if found.is_link_local:
        return Scope.LINK_LOCAL
    return Scope.PUBLIC if found.is_global else Scope.PRIVATE


@dataclass(frozen=True)
class Interface:
    """One interface; an IPv4 address comes first. A bridge joins containers or virtual machines of this host."""

    name: str
    addresses: tuple[str, ...] = ()
    is_up: bool = True
    is_loopback: bool = False
    is_bridge: bool = False

    def __str__(self) -> str:
        told = [f"{address} ({scope_of(address)})" for address in self.addresses] or ["no address"]
        return f"{self.name} {'up' if self.is_up else 'down'}: {', '.join(told)}"


def read_interfaces(sys_net: Path = SYS_NET) -> tuple[Interface, ...]:
    """Return all interfaces sorted by name."""
    stats, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    return tuple(
        Interface(
            name,
            tuple(
                each.address.partition("%")[0]
                for family in (socket.AF_INET, socket.AF_INET6)
                for each in addresses.get(name, [])
                if each.family == family
            ),
            is_up=stats[name].isup,
            is_loopback="loopback" in stats[name].flags.split(","),
            is_bridge=(sys_net / name / "bridge").is_dir(),
        )
        for name in sorted(stats)
    )
