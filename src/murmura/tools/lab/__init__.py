"""Simulate hosts and slow networks on one machine with network namespaces, for tests and benchmarks."""

from murmura.tools.lab.hosts import Hosts
from murmura.tools.lab.network import Counters, Host

__all__ = ["Counters", "Host", "Hosts"]
