"""The lab of `murmura lab up`, which stays until `murmura lab down`; there is at most one on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from murmura.errors import UsageError
from murmura.tools.lab import namespaces, network
from murmura.tools.lab.network import Host


@dataclass(frozen=True)
class PersistentLab:
    """The hosts of `murmura lab up`, and the rate of their links."""

    hosts: tuple[Host, ...]
    rate: str | None

    def __str__(self) -> str:
        return f"a lab of {len(self.hosts)} hosts, {self.rate or 'unlimited'}"


def up(num_hosts: int, rate: str | None = None) -> PersistentLab:
    """Build the persistent lab, after removing the labs of killed processes."""
    network.check(num_hosts, rate)
    namespaces.check_tools()
    network.remove_leftovers()
    for found in _persistent_labs().values():
        raise UsageError(f"{found} is up already. Take it down first: murmura lab down.")
    lab = namespaces.new_lab()
    try:
        hosts = network.build(lab, num_hosts, rate)
        network.write_metadata(lab, {"hosts": num_hosts, "rate": rate})  # from here on it stays when this process ends
    except BaseException:
        namespaces.remove(namespaces.labs().get(lab, []))
        raise
    return PersistentLab(hosts, rate)


def find() -> PersistentLab:
    """Return the persistent lab; a `UsageError` if there is none."""
    namespaces.check_tools()
    for found in _persistent_labs().values():
        return found
    raise UsageError("no lab is up. Start one: murmura lab up --hosts 4 --bandwidth 100mbit.")


def down() -> PersistentLab | None:
    """Remove the persistent lab and those of killed processes, with all that runs in them; return the former."""
    namespaces.check_tools()
    network.remove_leftovers()
    found = _persistent_labs()
    for lab in found:
        namespaces.remove(namespaces.labs().get(lab, []))
    return next(iter(found.values()), None)


def _persistent_labs() -> dict[str, PersistentLab]:
    found = {}
    for lab in namespaces.labs():
        if metadata := network.read_metadata(lab):
            hosts = tuple(Host(index, f"{lab}-h{index}") for index in range(metadata["hosts"]))
            found[lab] = PersistentLab(hosts, metadata["rate"])
    return found
