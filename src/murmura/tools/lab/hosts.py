"""Hosts: simulated hosts that exist as long as a `with` block lasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self, overload

from murmura.tools.lab import namespaces, network, running
from murmura.tools.lab.network import Host

__all__ = ["Hosts"]


class Hosts(Sequence[Host]):
    """`n` network namespaces connected by links of `rate` ("100mbit", "1gbit"; None: no limit).

    For murmura and torch they are separate hosts with their own addresses. They need root and iproute2, and are not
    connected to the machine's own network. `close` stops every process in them and removes them; if this process is
    killed first, the next lab on this machine does.
    """

    def __init__(self, n: int, rate: str | None = None) -> None:
        network.check(n, rate)
        namespaces.check_tools()
        network.remove_leftovers()
        self.rate = rate
        self._lab = namespaces.new_lab()
        try:
            self._hosts = network.build(self._lab, n, rate)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        capture: bool = False,
        timeout: float = 600.0,
    ) -> list[str]:
        """Run `command` on every host, `ranks_per_host` times each, as the ranks of one world.

        The ranks get the variables that torchrun sets, for `murmura.connect()`, and those of `env`. With `capture` each
        rank's standard output is returned, in rank order; otherwise it is shown, the rank in front. If a rank fails,
        the others are stopped and a `PeerLost` names it; after `timeout` seconds a `PeerTimeout` is raised. It must
        be called in the main thread, for signals are passed on to the ranks.
        """
        return running.run(self._hosts, command, ranks_per_host, env or {}, capture, timeout)

    def shape(self, rate: str) -> None:
        """Change the rate of every link, also while something runs on the hosts."""
        network.check(len(self), rate)
        network.shape(self._lab, self._hosts, rate)
        self.rate = rate

    def close(self) -> None:
        """Stop all processes on the hosts and remove them; idempotent."""
        namespaces.remove(namespaces.labs().get(self._lab, []))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._hosts)

    @overload
    def __getitem__(self, index: int) -> Host: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Host]: ...
    def __getitem__(self, index: int | slice) -> Host | Sequence[Host]:
        return self._hosts[index]
