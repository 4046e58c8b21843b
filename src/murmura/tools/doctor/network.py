"""Check how ranks on other hosts would reach this one.

Gloo takes the interface that GLOO_SOCKET_IFNAME names; else the first address of the host name that belongs to this
host; else loopback. Ranks of one host need none of this: they share memory, or talk over loopback.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from murmura.tools.doctor.findings import Finding, Section
from murmura.tools.doctor.interfaces import Interface, Scope, read_interfaces, scope_of
from murmura.tools.doctor.with_timeout import call_with_timeout, one_line

RESOLVE_SECONDS = 5.0
ONE_HOST = "Ranks of one host are not concerned."


@dataclass(frozen=True)
class Resolved:
    """An address of the host name, and whether it belongs to this host."""

    address: str
    is_local: bool


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """How other hosts see this one."""

    interfaces: tuple[Interface, ...]  # all there are
    host_name: str  # what this host calls itself
    resolved: tuple[Resolved, ...] = ()  # the addresses of that name, in the resolver's order
    resolve_fault: str = ""  # why there is none
    gloo_interfaces: tuple[str, ...] = ()  # those named by GLOO_SOCKET_IFNAME


def gather(gloo_socket_ifname: str | None = None, resolve: Callable[[str], list[str]] | None = None) -> NetworkFacts:
    """Gather the facts; `resolve` replaces the system's resolver in tests."""
    host_name = socket.gethostname()
    asked = call_with_timeout(lambda: (resolve or _resolve)(host_name), RESOLVE_SECONDS)
    return NetworkFacts(
        interfaces=read_interfaces(),
        host_name=host_name,
        resolved=tuple(Resolved(address, _is_local(address)) for address in asked.value or ()),
        resolve_fault=one_line(asked.fault) if asked.fault else "",
        gloo_interfaces=tuple(name.strip() for name in (gloo_socket_ifname or "").split(",") if name.strip()),
    )


def _resolve(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_local(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def check(facts: NetworkFacts) -> list[Finding]:
    choice = _judge_chosen(facts) if facts.gloo_interfaces else _judge_host_name(facts)
    return [_judge_interfaces(facts), *_judge_loopback(facts), choice, *_judge_exposure(facts)]


def reachable(interfaces: tuple[Interface, ...]) -> list[Interface]:
    """Return the interfaces that other hosts may reach, those with a private address first."""
    found = [each for each in interfaces if each.is_up and not each.is_bridge and outer_address(each)]
    return sorted(found, key=lambda each: scope_of(outer_address(each)) is Scope.PUBLIC)


def outer_address(interface: Interface) -> str:
    """Return the first address that other hosts may reach; empty if there is none."""
    outer = (each for each in interface.addresses if scope_of(each) in (Scope.PRIVATE, Scope.PUBLIC))
    return "" if interface.is_loopback else next(outer, "")


def gloo_address(facts: NetworkFacts) -> str:
    """Return the address that Gloo would announce to other hosts; empty for none."""
    if facts.gloo_interfaces:
        named = next((each for each in facts.interfaces if each.name == facts.gloo_interfaces[0]), None)
        return named.addresses[0] if named and named.addresses else ""
    return next((each.address for each in facts.resolved if each.is_local), "")


def _judge_interfaces(facts: NetworkFacts) -> Finding:
    detail = "; ".join(map(str, facts.interfaces)) or "none"
    outer = reachable(facts.interfaces)
    if outer:
        return Section.NETWORK.ok(f"a network, through {', '.join(each.name for each in outer)}", detail)
    return Section.NETWORK.note(
        "no interface to other hosts is known",
        detail,
        f"{ONE_HOST} For several hosts, bring a network up and give this host an address in it.",
    )


def _judge_loopback(facts: NetworkFacts) -> list[Finding]:
    down = [each for each in facts.interfaces if each.is_loopback and not (each.is_up and each.addresses)]
    return [
        Section.NETWORK.broken(
            "loopback is down",
            f"{each}; over it Gloo connects the ranks of one host",
            f"Bring it up: ip link set {each.name} up. Until then: shared memory, or threads.",
        )
        for each in down
    ]


def _judge_chosen(facts: NetworkFacts) -> Finding:
    known = {each.name: each for each in facts.interfaces}
    told = f"GLOO_SOCKET_IFNAME={','.join(facts.gloo_interfaces)}"
    missing = [name for name in facts.gloo_interfaces if name not in known]
    if missing:
        return Section.NETWORK.broken(
            f"{told} names no interface of this host",
            f"there is no {', no '.join(missing)}; there are: {', '.join(known)}",
            f"Gloo fails between hosts: {_choose(facts)}, or unset it.",
        )
    useless = [known[name] for name in facts.gloo_interfaces if known[name] not in reachable(facts.interfaces)]
    if useless:
        return Section.NETWORK.warning(
            f"{told} does not lead to other hosts",
            "; ".join(map(str, useless)),
            f"{ONE_HOST} For several hosts: {_choose(facts)}.",
        )
    return Section.NETWORK.ok(told, f"Gloo announces {gloo_address(facts)}")


def _judge_host_name(facts: NetworkFacts) -> Finding:
    """Find the common fault of a host name that resolves to loopback, so that every host connects to itself."""
    name, address = facts.host_name, gloo_address(facts)
    if address and scope_of(address) is not Scope.LOOPBACK:
        return Section.NETWORK.ok(f"host name {name}", f"resolves to {address}, as other hosts need it")
    if address:
        title = f"host name {name} resolves to loopback"
        detail = (
            f"{address}: with several hosts Gloo would tell the others this address, and they would call themselves"
        )
    elif facts.resolved:
        title = f"host name {name} resolves to another host"
        strangers = ", ".join(each.address for each in facts.resolved)
        detail = f"{strangers} is no address of this host; with several hosts Gloo would fall back to loopback"
    else:
        title = f"host name {name} does not resolve"
        detail = f"{facts.resolve_fault}; with several hosts Gloo would fall back to loopback"
    outer = reachable(facts.interfaces)
    if not outer:
        advice = f"{ONE_HOST} For several hosts, this one needs an address that the others can reach."
        return Section.NETWORK.note(title, detail, advice)
    advice = (
        f"{ONE_HOST} For several hosts: {_choose(facts)}, on each host its own; or let /etc/hosts give {name} the "
        f"address {outer_address(outer[0])}."
    )
    return Section.NETWORK.warning(title, detail, advice)


def _judge_exposure(facts: NetworkFacts) -> list[Finding]:
    """Warn if hosts would communicate over the internet: the traffic is neither encrypted nor signed."""
    address = gloo_address(facts)
    if not address or scope_of(address) is not Scope.PUBLIC:
        return []
    private = [each for each in reachable(facts.interfaces) if scope_of(outer_address(each)) is Scope.PRIVATE]
    instead = f"set GLOO_SOCKET_IFNAME={private[0].name}" if private else "join the hosts by a private network or a VPN"
    return [
        Section.NETWORK.warning(
            "several hosts would communicate over a public address",
            f"{address}: torch's store and Gloo neither encrypt nor ask who is calling, and anybody may call",
            f"{ONE_HOST} For several hosts: {instead}, and let a firewall admit only the hosts of the job.",
        )
    ]


def _choose(facts: NetworkFacts) -> str:
    outer = reachable(facts.interfaces)
    return f"set GLOO_SOCKET_IFNAME={outer[0].name}" if outer else "set GLOO_SOCKET_IFNAME once a network is up"
