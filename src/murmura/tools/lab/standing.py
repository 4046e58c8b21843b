"""The lab that outlives the command that made it: `murmura lab up`, `murmura lab down`. One at a time on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from murmura.errors import UsageError
from murmura.tools.lab import namespaces, network
from murmura.tools.lab.network import Host


@dataclass(frozen=True)
class StandingLab:
    """The hosts of `murmura lab up`, and the rate of their links."""

    hosts: tuple[Host, ...]
    rate: str | None

    def __str__(self) -> str:
        return f"a lab of {len(self.hosts)} hosts, {self.rate or 'unlimited'}"


def up(num_hosts: int, rate: str | None = None) -> StandingLab:
    """Build the standing lab, after removing what killed processes left of theirs."""
    network.check(num_hosts, rate)
    namespaces.check_tools()
    network.remove_leftovers()
    for found in _standing().values():
        raise UsageError(f"{found} is up already. Take it down first: murmura lab down.")
    lab = namespaces.new_lab()
    try:
        hosts = network.build(lab, num_hosts, rate)
        network.leave_note(lab, {"hosts": num_hosts, "rate": rate})  # from here on it may outlive this process
    except BaseException:
        namespaces.remove(namespaces.labs().get(lab, []))
        raise
    return StandingLab(hosts, rate)


def find() -> StandingLab:
    """The standing lab; a `UsageError` if there is none."""
    namespaces.check_tools()
    for found in _standing().values():
        return found
    raise UsageError("no lab is up. Start one: murmura lab up --hosts 4 --bandwidth 100mbit.")


def down() -> StandingLab | None:
    """Remove the standing lab with everything that runs in it, and leftovers; returns what was there."""
    namespaces.check_tools()
    network.remove_leftovers()
    standing = _standing()
    for lab in standing:
        namespaces.remove(namespaces.labs().get(lab, []))
    return next(iter(standing.values()), None)


def _standing() -> dict[str, StandingLab]:
    found = {}
    for lab in namespaces.labs():
        if note := network.read_note(lab):
            hosts = tuple(Host(index, f"{lab}-h{index}") for index in range(note["hosts"]))
            found[lab] = StandingLab(hosts, note["rate"])
    return found
