"""Ranks on several hosts: shared memory inside a host, a process group between the hosts' leaders."""

from murmura.transports.hierarchical.transport import HierarchicalTransport

__all__ = ["HierarchicalTransport"]
