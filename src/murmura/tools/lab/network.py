"""The network of a lab: a bridge in a namespace of its own, and a link from it to each host's.

Nothing is added to the network of the machine, and no host has a route to it. Each link is shaped in both directions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmura.errors import ConfigError, MurmuraError, UsageError
from murmura.tools.lab import namespaces
from murmura.tools.lab.namespaces import command
from murmura.transports.decorators.throttled import parse_rate

INTERFACE, BRIDGE = "eth0", "br0"
SUBNET = "10.213.77"
MAX_HOSTS = 250


@dataclass(frozen=True)
class Counters:
    """What an interface has carried since it was made, as the kernel counts it: with Ethernet and IP headers."""

    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        """What was carried since `earlier`."""
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
        """The command line that runs `words` on this host, with these environment variables besides the caller's.

        Gloo and NCCL are told which interface to use.
        """
        variables = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE, **variables}
        settings = [f"{name}={value}" for name, value in variables.items()]
        return ["ip", "netns", "exec", self.namespace, "env", *settings, *words]

    def counters(self) -> Counters:
        """Of this host's interface: what it received (rx) and sent (tx)."""
        shown = command("ip", "-n", self.namespace, "-json", "-statistics", "link", "show", INTERFACE)
        (link,) = json.loads(shown)
        rx, tx = link["stats64"]["rx"], link["stats64"]["tx"]
        return Counters(rx["bytes"], tx["bytes"], rx["packets"], tx["packets"])


def interface_traffic(interface: str = INTERFACE) -> Counters:
    """What an interface of the host that this process runs on has carried."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counted = line.partition(":")
        if name.strip() == interface:
            fields = [
                int(field) for field in counted.split()
            ]  # eight of what was received, then eight of what was sent
            return Counters(fields[0], fields[8], fields[1], fields[9])
    raise MurmuraError(f"this host has no interface {interface}, so what it sends cannot be counted.")


def check(num_hosts: int, rate: str | None) -> None:
    """A `ConfigError` for what cannot be built."""
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise ConfigError(f"{num_hosts} hosts: a lab has 1 to {MAX_HOSTS}.")
    if rate is not None:
        parse_rate(rate)


def build(lab: str, num_hosts: int, rate: str | None) -> tuple[Host, ...]:
    """Make the namespaces and links of `lab`; what a failure leaves is the caller's to remove."""
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
    """Give every link of `lab` that rate, in both directions, whatever it had before."""
    bucket = ["root", "tbf", "rate", rate.strip().lower().replace(" ", ""), "burst", "512kb", "latency", "50ms"]
    for host in hosts:
        command("tc", "-n", f"{lab}-switch", "qdisc", "replace", "dev", f"h{host.index}", *bucket)  # what it receives
        command("tc", "-n", host.namespace, "qdisc", "replace", "dev", INTERFACE, *bucket)  # what it sends


def leave_note(lab: str, note: dict[str, Any]) -> None:
    """Write it on the lab's bridge, so that it goes when the lab goes."""
    command("ip", "-n", f"{lab}-switch", "link", "set", BRIDGE, "alias", json.dumps(note))


def read_note(lab: str) -> dict[str, Any] | None:
    """The note that was left on the lab, if one was."""
    try:
        (bridge,) = json.loads(command("ip", "-n", f"{lab}-switch", "-json", "link", "show", BRIDGE))
    except UsageError:  # half built, or just being removed
        return None
    return json.loads(bridge["ifalias"]) if "ifalias" in bridge else None


def remove_leftovers() -> None:
    """Remove the labs whose owner died and which were not meant to stay."""
    for lab, names in namespaces.labs().items():
        if not namespaces.owner_lives(lab) and read_note(lab) is None:
            namespaces.remove(names)
