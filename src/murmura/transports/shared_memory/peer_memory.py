"""Reading the memory of the other ranks where it lies, without staging it (cross-memory attach, Linux).

A rank *offers* a tensor that it reduces again and again: the third time it asks the kernel to put the tensor into huge
pages, without which a read costs as much as staging, and offers it from then on, if it can read every peer itself. So
where the kernel refuses (another user, seccomp, Yama, a debugger's restriction), ranks stage, as they do unless all
offer. Nobody ever writes into a peer's memory: a rank that has given up and freed the tensor would be corrupted.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
from typing import Any

import numpy as np

from murmura.collectives.chunks import PIECE_BYTES
from murmura.transports.liveness import process_state
from murmura.transports.shared_memory.arena import round_up
from murmura.transports.shared_memory.control_block import NONCE, NONCE_AT, ControlBlock

OFFERED = 1 << 62  # beside an address, in a word that otherwise holds a place
MIN_BYTES = 4 * 2**20
SCRATCH_BYTES = 4 * PIECE_BYTES
"""What is read of a peer at a time: a call costs as much as reading 30 KiB, and more would not stay in the caches."""
SIGHTINGS = 3  # collapsing costs as much as some 25 all-reduces gain
MAX_SEEN = 256
_HUGE_BYTES = 2 * 2**20
_MADV_COLLAPSE = 25  # since Linux 6.1


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if hasattr(libc, "process_vm_readv"):
        libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


class PeerMemory:
    """What one rank sees of its peers' memory; for the thread that runs the channel's operations."""

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        nonce = secrets.randbits(63)
        self._nonce = ctypes.c_int64(nonce)  # what peers read to find out whether they can
        control.words[control.own + NONCE] = nonce
        control.words[control.own + NONCE_AT] = ctypes.addressof(self._nonce)
        self._pids: dict[int, int] | None = None  # of the peers, once they were tried; empty if one cannot be read
        self._seen: dict[tuple[int, int], int] = {}  # sightings of a tensor by address and bytes; -1: never to offer
        self._scratch: dict[int, Any] = {}

    def offer(self, address: int, num_bytes: int) -> int | None:
        """The address of a tensor if its peers may read it there, with OFFERED; None if it is to be staged."""
        key = address, num_bytes
        seen = self._seen.get(key, 0)
        if num_bytes < MIN_BYTES or seen < 0:
            return None
        if seen < SIGHTINGS:
            if len(self._seen) >= MAX_SEEN:
                self._seen.clear()
            self._seen[key] = seen = seen + 1
            if seen == SIGHTINGS and not (self._can_read_peers() and _collapse(address, num_bytes)):
                self._seen[key] = -1
                return None
        return OFFERED | address if seen == SIGHTINGS else None

    def scratch(self, peer: int) -> Any:
        """Bytes to read a piece of `peer`'s memory into."""
        if peer not in self._scratch:
            self._scratch[peer] = np.empty(SCRATCH_BYTES, dtype=np.uint8)
        return self._scratch[peer]

    def read(self, peer: int, address: int, target: int, num_bytes: int) -> None:
        """Copy `peer`'s bytes from `address` to `target`; an OSError says why they cannot be read."""
        assert self._pids
        _read(self._pids[peer], address, target, num_bytes)

    def _can_read_peers(self) -> bool:
        if self._pids is None:
            control = self._control
            pids = {peer: process_state(control.life_fds[peer])[0] for peer in control.peers}
            self._pids = pids if all(self._can_read(peer, pid) for peer, pid in pids.items()) else {}
        return bool(self._pids)

    def _can_read(self, peer: int, pid: int) -> bool:
        address, found = self._control.read(peer, NONCE_AT), ctypes.c_int64()
        try:
            _read(pid, address, ctypes.addressof(found), ctypes.sizeof(found))
        except OSError:
            return False
        return found.value == self._control.read(peer, NONCE)


def _read(pid: int, address: int, target: int, num_bytes: int) -> None:
    libc = _libc()
    if pid <= 0 or not hasattr(libc, "process_vm_readv"):
        raise OSError("the process is not visible here")
    here, there = _Range(target, num_bytes), _Range(address, num_bytes)
    copied = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if copied != num_bytes:
        error = ctypes.get_errno() if copied < 0 else 0
        raise OSError(error, os.strerror(error) if error else f"{copied} of {num_bytes} bytes could be read")


def _collapse(address: int, num_bytes: int) -> bool:
    """Put memory into huge pages, as far as it is aligned; False if the kernel does not."""
    start, stop = round_up(address, _HUGE_BYTES), (address + num_bytes) // _HUGE_BYTES * _HUGE_BYTES
    return stop > start and _libc().madvise(start, stop - start, _MADV_COLLAPSE) == 0
