"""Check what shared memory needs of the kernel: memfd, futex, pidfd and abstract sockets."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from murmura.tools.doctor.findings import Finding, Section
from murmura.tools.doctor.memory import gib
from murmura.transports.shared_memory import futex

RANK_BYTES = 4 * 2**30  # address space of a process that has imported torch, without the segment; an upper bound
FEW_FILES = 256  # a rank holds a descriptor for each peer, file and connection
SMALL_DEV_SHM_BYTES = 64 * 2**20  # what Docker gives a container


@dataclass(frozen=True, kw_only=True)
class SharedMemoryFacts:
    """What the kernel provides for shared memory."""

    supported: bool  # whether murmura can share memory on a system of this kind
    faults: dict[str, str] = field(default_factory=dict)  # by name, what should work and does not
    total_bytes: int | None = None  # memory of the machine; a rank maps as much for each rank of its world
    address_space_bytes: int | None = None  # RLIMIT_AS; None is no limit
    open_files: int | None = None  # RLIMIT_NOFILE; None is no limit
    dev_shm_bytes: int | None = None  # size of /dev/shm; None if there is none


def gather(dev_shm: Path = Path("/dev/shm")) -> SharedMemoryFacts:
    supported = futex.is_supported()
    tries: dict[str, Callable[[], None]] = {
        "memfd": _try_memfd,
        "pidfd": _try_pidfd,
        "futex": _try_futex,
        "abstract socket": _try_abstract_socket,
    }
    faults = {}
    for name, work in tries.items() if supported else ():
        try:
            work()
        except OSError as error:
            faults[name] = error.strerror or str(error)
    address_space, open_files = _resource_limits()
    return SharedMemoryFacts(
        supported=supported,
        faults=faults,
        total_bytes=psutil.virtual_memory().total,
        address_space_bytes=address_space,
        open_files=open_files,
        dev_shm_bytes=_dev_shm_bytes(dev_shm),
    )


def _try_memfd() -> None:
    fd = os.memfd_create("murmura-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2**20)
        os.posix_fallocate(fd, 0, 4096)
    finally:
        os.close(fd)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_futex() -> None:
    word = ctypes.c_uint32(1)
    ctypes.set_errno(0)
    futex.wait(ctypes.addressof(word), 0, 0.0)  # the word is not 0, so a working kernel returns EAGAIN
    if (code := ctypes.get_errno()) != errno.EAGAIN:
        raise OSError(code, os.strerror(code) if code else "it does not look at the word")


def _try_abstract_socket() -> None:
    address = f"\0murmura-doctor-{uuid.uuid4().hex}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        listener.bind(address)
        listener.listen(1)
        client.settimeout(1.0)
        client.connect(address)


def _resource_limits() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None, None
    soft = [resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE)]
    address_space, open_files = (None if limit == resource.RLIM_INFINITY else limit for limit in soft)
    return address_space, open_files


def _dev_shm_bytes(dev_shm: Path) -> int | None:
    with contextlib.suppress(OSError, AttributeError):
        found = os.statvfs(dev_shm)
        return found.f_frsize * found.f_blocks
    return None


def check(facts: SharedMemoryFacts) -> list[Finding]:
    if not facts.supported:
        return [
            Section.SHARED_MEMORY.note(
                "shared memory between processes is not available on this system",
                "it needs Linux 5.3 or newer on a supported processor, and Python's memfd and pidfd",
                "Use threads, run_world(fn, n, kind='threads'), or processes over Gloo.",
            )
        ]
    return [_judge_kernel(facts), _judge_address_space(facts), _judge_open_files(facts), _judge_dev_shm(facts)]


def _judge_kernel(facts: SharedMemoryFacts) -> Finding:
    if not facts.faults:
        return Section.SHARED_MEMORY.ok("the kernel's part", "memfd, pidfd, futex and abstract sockets work")
    return Section.SHARED_MEMORY.broken(
        f"no {', no '.join(facts.faults)}",
        "; ".join(f"{name}: {fault}" for name, fault in facts.faults.items()),
        "Something forbids these calls, most likely the sandbox or seccomp profile of a container. Allow them, or use "
        "threads, or processes over Gloo.",
    )


def _judge_address_space(facts: SharedMemoryFacts) -> Finding:
    limit, total = facts.address_space_bytes, facts.total_bytes
    if limit is None or total is None:
        return Section.SHARED_MEMORY.ok("address space", "there is no limit on it (ulimit -v)")
    num_ranks = max(0, limit - RANK_BYTES) // total
    detail = (
        f"ulimit -v allows {gib(limit)}; each rank maps {gib(total)} for each rank of its world (address space, not "
        "memory)"
    )
    advice = "Lift it before you start the ranks: ulimit -v unlimited (the hard limit permitting)."
    if num_ranks < 2:
        return Section.SHARED_MEMORY.broken("too little address space for two ranks", detail, advice)
    return Section.SHARED_MEMORY.warning(f"address space for about {num_ranks} ranks", detail, advice)


def _judge_open_files(facts: SharedMemoryFacts) -> Finding:
    if facts.open_files is None or facts.open_files >= FEW_FILES:
        told = "there is no limit on them" if facts.open_files is None else f"ulimit -n allows {facts.open_files}"
        return Section.SHARED_MEMORY.ok("open files", told)
    return Section.SHARED_MEMORY.warning(
        f"only {facts.open_files} open files",
        "each rank holds a descriptor for every other rank, besides those of its data and of torch",
        "Raise it before you start the ranks: ulimit -n 4096",
    )


def _judge_dev_shm(facts: SharedMemoryFacts) -> Finding:
    if facts.dev_shm_bytes is None:
        return Section.SHARED_MEMORY.ok("/dev/shm", "there is none, and murmura does not use it")
    size = f"{facts.dev_shm_bytes / 2**20:.0f} MiB"
    if facts.dev_shm_bytes > SMALL_DEV_SHM_BYTES:
        return Section.SHARED_MEMORY.ok("/dev/shm", f"{size}; murmura does not use it")
    return Section.SHARED_MEMORY.note(
        f"/dev/shm has only {size}",
        "murmura does not use it, but the workers of torch's DataLoader do, and die of a bus error when it is full",
        "If you use num_workers > 0, make it larger: docker run --shm-size=2g, or an emptyDir of medium Memory.",
    )
