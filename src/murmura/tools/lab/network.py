"""The network of a lab: a bridge in a namespace of its own, and a link from it to each host's.

Nothing is added to the network of the machine, and no host has a route to it. Each link is shaped in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from murmura.errors import ConfigError, MurmuraError, UsageError
from murmura.tools.lab import namespaces
from murmura.tools.lab.namespaces import command
from murmura.transports.decorators.throttled import parse_rate

INTERFACE, BRIDGE = "eth0", "br0"
SUBNET = "10.213.77"
MAX_HOSTS = 250


@dataclass(frozen=True)
class Counters:
    """The kernel's counters of an interface since it was made; bytes include Ethernet and IP headers."""

    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        """Return the traffic since `earlier`."""
        return Counters(*(getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Host:
    """A simulated host: a network namespace with one interface on the lab's network."""

    index: int
    namespace: str

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.index + 1}"

    @property
    def interface(self) -> str:
        return INTERFACE

    def command(self, words: Sequence[str], **variables: str) -> list[str]:
        """Return the command line that runs `words` on this host with additional environment variables.

        Gloo and NCCL are set to use the lab's interface.
        """
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, **variables}
        settings = [f"{name}={value}" for name, value in variables.items()]
        return ["ip", "netns", "exec", self.namespace, "env", *settings, *words]

    def counters(self) -> Counters:
        """Return what this host's interface received (rx) and sent (tx)."""
        shown = command("ip", "-n", self.namespace, "-json", "-statistics", "link", "show", INTERFACE)
        (link,) = json.loads(shown)
        rx, tx = link["stats64"]["rx"], link["stats64"]["tx"]
        return Counters(rx["bytes"], tx["bytes"], rx["packets"], tx["packets"])


def interface_traffic(interface: str = INTERFACE) -> Counters:
    """Return the counters of an interface of the host that this process runs on."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False).get(interface)
    if counted is None:
        raise MurmuraError(f"this host has no interface {interface}, so what it sends cannot be counted.")
    return Counters(counted.bytes_recv, counted.bytes_sent, counted.packets_recv, counted.packets_sent)


def check(num_hosts: int, rate: str | None) -> None:
    """Raise a `ConfigError` if such a lab cannot be built."""
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise ConfigError(f"{num_hosts} hosts: a lab has 1 to {MAX_HOSTS}.")
    if rate is not None:
        parse_rate(rate)


def build(lab: str, num_hosts: int, rate: str | None) -> tuple[Host, ...]:
    """Make the namespaces and links of `lab`; after a failure the caller removes them."""
    switch = f"{lab}-switch"
    hosts = tuple(Host(index, f"{lab}-h{index}") for index in range(num_hosts))
    command("ip", "netns", "add", switch)
    command("ip", "-n", switch, "link", "add", BRIDGE, "type", "bridge")
    command("ip", "-n", switch, "link", "set", BRIDGE, "up")
    for host in hosts:
        name, port = host.namespace, f"h{host.index}"
        command("ip", "netns", "add", name)
        command("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        command("ip", "-n", switch, "link", "set", port, "master", BRIDGE, "up")
        command("ip", "-n", name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        command("ip", "-n", name, "link", "set", INTERFACE, "up")
        command("ip", "-n", name, "link", "set", "lo", "up")
    if rate is not None:
        shape(lab, hosts, rate)
    return hosts


def shape(lab: str, hosts: Sequence[Host], rate: str) -> None:
    """Set the rate of every link of `lab`, in both directions."""
    bucket = ["root", "tbf", "rate", rate.strip().lower().replace(" ", ""), "burst", "512kb", "latency", "50ms"]
    for host in hosts:
        command("tc", "-n", f"{lab}-switch", "qdisc", "replace", "dev", f"h{host.index}", *bucket)  # what it receives
        command("tc", "-n", host.namespace, "qdisc", "replace", "dev", INTERFACE, *bucket)  # what it sends


def write_metadata(lab: str, metadata: dict[str, Any]) -> None:
    """Store `metadata` as the alias of the lab's bridge, so that it is removed with the lab."""
    command("ip", "-n", f"{lab}-switch", "link", "set", BRIDGE, "alias", json.dumps(metadata))


def read_metadata(lab: str) -> dict[str, Any] | None:
    """Return what `write_metadata` stored, or None."""
    try:
        (bridge,) = json.loads(command("ip", "-n", f"{lab}-switch", "-json", "link", "show", BRIDGE))
    except UsageError:  # being built or removed
        return None
    return json.loads(bridge["ifalias"]) if "ifalias" in bridge else None


def remove_leftovers() -> None:
    """Remove the labs whose process died, except a persistent one."""
    for lab, names in namespaces.labs().items():
        if not namespaces.owner_lives(lab) and read_metadata(lab) is None:
            namespaces.remove(names)
