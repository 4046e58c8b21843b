"""List the network interfaces of this process's network namespace, without external tools."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SIOCGIFFLAGS, SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
IFF_UP, IFF_LOOPBACK, IFF_RUNNING = 0x1, 0x8, 0x40  # linux/if.h
SYS_NET = Path("/sys/class/net")
INET6_TABLE = Path("/proc/net/if_inet6")


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


class Kernel:
    """Query an interface by ioctl: /sys may show another namespace's interfaces."""

    def names(self) -> list[str]:
        return sorted(name for _, name in socket.if_nameindex())

    def flags(self, name: str) -> int | None:
        """Return the flags; None if the system is not Linux."""
        answer = self._ask(SIOCGIFFLAGS, name)
        return struct.unpack_from("H", answer, 16)[0] if answer else None

    def inet(self, name: str) -> str:
        """Return the first IPv4 address; empty if there is none."""
        answer = self._ask(SIOCGIFADDR, name)
        return socket.inet_ntoa(answer[20:24]) if answer else ""

    def _ask(self, request: int, name: str) -> bytes:
        with contextlib.suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            import fcntl

            return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
        return b""


def read_interfaces(
    kernel: Kernel | None = None, inet6_table: Path = INET6_TABLE, sys_net: Path = SYS_NET
) -> tuple[Interface, ...]:
    """Return all interfaces sorted by name; without addresses if the system is not Linux."""
    kernel = kernel or Kernel()
    inet6 = read_inet6(inet6_table)
    return tuple(_read_interface(kernel, name, inet6.get(name, ()), sys_net) for name in kernel.names())


def _read_interface(kernel: Kernel, name: str, inet6: Sequence[str], sys_net: Path) -> Interface:
    inet, flags = kernel.inet(name), kernel.flags(name)
    addresses = (*((inet,) if inet else ()), *inet6)
    running = IFF_UP | IFF_RUNNING
    return Interface(
        name,
        addresses,
        is_up=bool(addresses) if flags is None else flags & running == running,
        is_loopback=name == "lo" if flags is None else bool(flags & IFF_LOOPBACK),
        is_bridge=(sys_net / name / "bridge").is_dir(),
    )


def read_inet6(table: Path) -> dict[str, tuple[str, ...]]:
    """IPv6 addresses by interface: "fe80...0001 02 40 20 80 eth0" has the address in 32 digits, the name last."""
    try:
        lines = table.read_text(encoding="ascii").splitlines()
    except OSError:  # no IPv6, or not Linux
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        digits, *_, name = line.split()
        found[name] = (*found.get(name, ()), str(ipaddress.IPv6Address(int(digits, 16))))
    return found
