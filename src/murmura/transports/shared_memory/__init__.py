"""Ranks as processes of one host that share a nameless piece of memory: no port, no file, nothing to leak."""

from murmura.transports.shared_memory.transport import SharedMemoryTransport

__all__ = ["SharedMemoryTransport"]
