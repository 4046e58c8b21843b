"""How the processes of one host find each other and come by the segment they share.

They meet at an abstract Unix socket: it has no file and no port, and ends with the process that holds it. Rank 0
holds it; both sides ask the kernel who the other is and talk only to processes of their own user. Each rank hands
in a sign of its life, a file descriptor that becomes readable when it dies, and gets the segment and everybody's sign.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import select
import selectors
import socket
import struct
import time
from dataclasses import dataclass

from murmura.errors import RendezvousError

VERDICT_SECONDS = 1.0  # after its own deadline, for rank 0 to say who is missing
MAX_RANKS = 250  # a message carries at most 253 file descriptors


@dataclass(frozen=True)
class Admission:
    """What a rank holds once everybody has come: the segment's memfd, and a sign of life of each rank."""

    segment_fd: int
    life_fds: tuple[int, ...]
    own_life: int  # to be kept open as long as this rank lives; -1 if the kernel does it


def meeting_address(key: str) -> str:
    """The abstract socket address of the job that `key` names; different users never share one."""
    return "\0murmura-" + hashlib.blake2b(f"{os.getuid()}:{key}".encode(), digest_size=16).hexdigest()


def admit(key: str, rank: int, world_size: int, segment_fd: int | None, timeout: float) -> Admission:
    """Meet the other ranks of the job `key`; rank 0 brings the segment. Raises `RendezvousError` at the deadline."""
    deadline = time.monotonic() + timeout
    sign, own_life = _sign_of_life()
    try:
        if rank == 0:
            assert segment_fd is not None
            fds = _host(key, world_size, segment_fd, sign, deadline, timeout)
        else:
            fds = _visit(key, rank, world_size, sign, deadline, timeout)
    except BaseException:
        if own_life >= 0:
            os.close(own_life)
        raise
    finally:
        os.close(sign)
    return Admission(fds[0], tuple(fds[1:]), own_life)


def _sign_of_life() -> tuple[int, int]:
    """A file descriptor that becomes readable for whoever holds it when this process dies; and what keeps it quiet.

    A pidfd, which sees the death itself. Where the kernel has none (gVisor, for one), the read end of a pipe whose
    write end dies with us: unless a child that we forked still holds it.
    """
    try:
        return os.pidfd_open(os.getpid()), -1
    except (OSError, AttributeError):
        return os.pipe()


def _host(key: str, world_size: int, segment_fd: int, sign: int, deadline: float, timeout: float) -> list[int]:
    guests: dict[int, socket.socket] = {}
    life_fds = {0: os.dup(sign)}
    refused: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        try:
            door.bind(meeting_address(key))
        except OSError as error:
            raise RendezvousError(
                "another world of this user is just being set up under the same name. "
                "Give each job its own DistributedConfig.job_id (or MURMURA_JOB_ID)."
            ) from error
        door.listen(world_size)
        try:
            while len(life_fds) < world_size:
                if not _readable(door, deadline):
                    dead = [rank for rank, fd in life_fds.items() if rank and _readable_now(fd)]
                    missing = tuple(rank for rank in range(world_size) if rank not in life_fds or rank in dead)
                    story = (
                        f"waited {timeout:.1f} s, but of {world_size} ranks {_list(missing)} did not come."
                        f"{''.join(' ' + each for each in refused)} Were they started, on this host, as this user, "
                        "with the same job_id, secret and world size?"
                    )
                    for guest in guests.values():
                        _send(guest, {"story": story, "missing": list(missing)})
                    raise RendezvousError(f"rank 0 {story}", missing)
                guest = door.accept()[0]
                fault = _receive_guest(guest, world_size, guests, life_fds, deadline)
                if fault:
                    refused.append(fault)
                    _send(guest, {"refused": fault})
                    guest.close()
            fds = [segment_fd, *(life_fds[rank] for rank in range(world_size))]
            for guest in guests.values():
                _send(guest, {"world_size": world_size}, fds)
        except BaseException:
            for fd in life_fds.values():
                os.close(fd)
            raise
        finally:
            for guest in guests.values():
                guest.close()
    return [os.dup(segment_fd), *(life_fds[rank] for rank in range(world_size))]


def _receive_guest(
    guest: socket.socket, world_size: int, guests: dict[int, socket.socket], life_fds: dict[int, int], deadline: float
) -> str:
    """Let a rank in; or say why not."""
    if _peer_uid(guest) != os.getuid():
        return "A process of another user was turned away."
    if not _readable(guest, min(deadline, time.monotonic() + 5.0)):
        return "A process that said nothing was turned away."
    message, fds = _receive(guest)
    rank, believed = message.get("rank"), message.get("world_size")
    fault = ""
    if len(fds) != 1 or not isinstance(rank, int):
        rank, fault = -1, "A process that did not follow the protocol was turned away."
    elif believed != world_size:
        fault = f"Rank {rank} believes in a world of {believed} ranks, rank 0 in one of {world_size}."
    elif not 0 < rank < world_size:
        fault = f"A process came as rank {rank}, which is none of 1 to {world_size - 1}."
    elif rank in life_fds:
        fault = f"A second process came as rank {rank}."
    if fault:
        for fd in fds:
            os.close(fd)
        return fault
    guests[rank], life_fds[rank] = guest, fds[0]
    return ""


def _visit(key: str, rank: int, world_size: int, sign: int, deadline: float, timeout: float) -> list[int]:
    def give_up(why: str, missing: tuple[int, ...] = ()) -> RendezvousError:
        return RendezvousError(f"rank {rank} waited {timeout:.1f} s {why}", missing)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
        host.setblocking(False)  # a full queue at the door must not hold us up beyond the deadline
        pause = 0.001
        while True:
            try:
                host.connect(meeting_address(key))
                break
            except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
                if time.monotonic() + pause > deadline:
                    raise give_up(
                        "for rank 0, which did not come. Was it started, on this host, as this user, with the same "
                        "job_id and secret?",
                        (0,),
                    ) from None
                time.sleep(pause)  # nothing to wait on: the door does not exist yet
                pause = min(2 * pause, 0.05)
        host.setblocking(True)
        if _peer_uid(host) != os.getuid():
            raise RendezvousError(
                f"rank {rank} found a process of another user at its meeting point and told it nothing. "
                "Choose another job_id, and tell whoever runs this machine."
            )
        _send(host, {"rank": rank, "world_size": world_size}, [sign])
        if not _readable(host, deadline + VERDICT_SECONDS):
            raise give_up("for the other ranks to come to rank 0. Its own error names those that did not.")
        message, fds = _receive(host)
    if "missing" in message:
        missing = message["missing"]
        raise RendezvousError(f"rank {rank} {message['story']}", tuple(missing) if isinstance(missing, list) else ())
    if "refused" in message:
        raise RendezvousError(f"rank {rank} was turned away by rank 0: {message['refused']}")
    if len(fds) != world_size + 1:
        for fd in fds:
            os.close(fd)
        raise RendezvousError(
            f"rank {rank} lost rank 0 while the world was being set up. Rank 0's own error says why.", (0,)
        )
    return fds


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _readable(connection: socket.socket, deadline: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, deadline - time.monotonic())))


def _readable_now(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _send(connection: socket.socket, message: dict[str, object], fds: list[int] | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it left; who waits for it will notice
        connection.sendmsg([json.dumps(message).encode()], rights)


def _receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    try:
        data, fds, _, _ = socket.recv_fds(connection, 4096, MAX_RANKS + 2, socket.MSG_CMSG_CLOEXEC)
        message = json.loads(data) if data else {}
    except (ConnectionResetError, ValueError):
        return {}, []
    return (message if isinstance(message, dict) else {}), list(fds)


def _list(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
