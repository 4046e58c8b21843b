"""Simulated hosts and slow networks on one machine; the public name of `murmura.tools.lab`, loaded on first use."""

from murmura.tools.lab import Counters, Host, Hosts

__all__ = ["Counters", "Host", "Hosts"]
