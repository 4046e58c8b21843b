"""What to measure: a frozen order, checked as a whole before any process is started."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from murmura.benchmarks.sizes import format_size
from murmura.errors import ConfigError
from murmura.types import parse

ELEMENT_BYTES = 4  # float32
POOL_BYTES = 96 * 2**20  # more than the caches hold: a buffer comes back cold, as a gradient does
POOL_BUFFERS = (2, 64)
BATCH_BYTES = 16 * 2**20
BATCH_OPERATIONS = 64


class Peer(StrEnum):
    """Whom murmura can be measured against."""

    GLOO = "gloo"
    MPICH = "mpich"


def parse_peers(names: Iterable[str]) -> tuple[Peer, ...]:
    """Peers from options that may each hold several, separated by commas; each counts once, in order."""
    entries = [entry.strip() for name in names for entry in name.split(",")]
    return tuple(dict.fromkeys(parse(Peer, entry, "--against") for entry in entries))


def num_buffers(size_bytes: int) -> int:
    """How many buffers of a size are used in turn."""
    fewest, most = POOL_BUFFERS
    return max(fewest, min(most, math.ceil(POOL_BYTES / size_bytes)))


def most_per_batch(size_bytes: int) -> int:
    """How many all-reduces of a size are timed at once at most; each on its own buffer."""
    return max(1, min(BATCH_OPERATIONS, BATCH_BYTES // size_bytes, num_buffers(size_bytes)))


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec:
    """An order for the all-reduce benchmark.

    Attributes:
        ranks: processes on this host.
        sizes_bytes: lengths of the message, each a multiple of 4 bytes.
        peers: who is measured beside murmura.
        seconds: how long to measure each size, all contestants together; a few rounds are measured in any case.
    """

    ranks: int = 2
    sizes_bytes: tuple[int, ...] = (4 * 2**10, 64 * 2**10, 2**20, 25 * 2**20, 100 * 2**20)
    peers: tuple[Peer, ...] = (Peer.GLOO,)
    seconds: float = 3.0

    def __post_init__(self) -> None:
        faults = []
        if self.ranks < 2:
            faults.append(f"{self.ranks} rank(s) have nobody to exchange with. Ask for 2 or more.")
        if not self.sizes_bytes:
            faults.append("there is no size to measure. Name at least one.")
        faults += [
            f"{size} bytes are no whole number of float32 elements. Take a multiple of {ELEMENT_BYTES}, at least that."
            for size in self.sizes_bytes
            if size < ELEMENT_BYTES or size % ELEMENT_BYTES
        ]
        if not 0 < self.seconds < math.inf:
            faults.append(f"{self.seconds} is not a time to measure for. Give seconds above 0.")
        if faults:
            raise ConfigError("\n".join(faults))

    def command(self) -> str:
        """The command that gives this order."""
        sizes = ",".join(format_size(size).replace(" ", "") for size in self.sizes_bytes)
        options = {"ranks": self.ranks, "sizes": sizes, "against": ",".join(self.peers), "seconds": f"{self.seconds:g}"}
        return " ".join(["murmura bench all-reduce", *(f"--{name} {value}" for name, value in options.items())])

    def needed_bytes(self, size_bytes: int) -> int:
        """About the memory that all ranks use together at one size: two pools, staging, the check of the sum."""
        return self.ranks * size_bytes * (2 * num_buffers(size_bytes) + 4)


def check_memory(spec: AllReduceSpec, available_bytes: int | None = None) -> None:
    """Raise a ConfigError if a size would not fit into the memory this machine has left."""
    available = _available_bytes() if available_bytes is None else available_bytes
    for size in spec.sizes_bytes:
        needed = spec.needed_bytes(size)
        if needed > 0.8 * available:
            raise ConfigError(
                f"{format_size(size)} on {spec.ranks} ranks needs about {needed / 2**30:.1f} GiB of memory, but "
                f"{available / 2**30:.1f} GiB are available. Leave the size out, or take fewer ranks."
            )


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
