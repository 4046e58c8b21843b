"""Hosts and slow networks simulated on one machine, by network namespaces: for tests, benchmarks and the curious."""

from murmura.tools.lab.hosts import Hosts
from murmura.tools.lab.network import Counters, Host

__all__ = ["Counters", "Host", "Hosts"]
