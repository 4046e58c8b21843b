"""How the processes of one host find each other and come by the segment they share.

They meet at an abstract Unix socket: it has no file and no port, and ends with the process that holds it. Rank 0
holds it; both sides ask the kernel who the other is and talk only to processes of their own user. Each rank hands
in a sign of its life, a file descriptor that becomes readable when it dies, and gets the segment and everybody's sign.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import struct
import time
from dataclasses import dataclass

from murmura.errors import RendezvousError
from murmura.transports.watched_store import Watch, nobody

GREET_SECONDS = 5.0  # for a process at the door to say who it is
LOOK_SECONDS = 0.1  # between two looks whether somebody can still come
DEATH_SECONDS = 0.2  # between the end of a process's connections and that of itself
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


def admit(
    key: str,
    rank: int,
    world_size: int,
    segment_fd: int | None,
    timeout: float,
    *,
    secret: str = "",
    watch: Watch = nobody,
) -> Admission:
    """Meet the other ranks of the job `key`; rank 0 brings the segment. Raises `RendezvousError` at the deadline.

    All must know the same `secret`. `watch` tells of ranks that cannot come any more.
    """
    deadline = time.monotonic() + timeout
    sign, own_life = _sign_of_life()
    try:
        if rank == 0:
            assert segment_fd is not None
            fds = _Host(world_size, secret).receive(key, segment_fd, sign, deadline, timeout, watch)
        else:
            fds = _visit(key, secret, rank, world_size, sign, deadline, timeout, watch)
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


@dataclass
class _Guest:
    """A process at the door; admitted once it has proved that it knows the secret."""

    connection: socket.socket
    until: float  # when it is turned away if it has not spoken
    rank: int = -1
    life_fd: int = -1
    nonce: str = ""  # what it was asked to prove

    def close(self) -> None:
        self.connection.close()
        if self.life_fd >= 0:
            os.close(self.life_fd)
            self.life_fd = -1


class _Host:
    """Rank 0 at the door: it talks to all guests at once, so that a silent one delays nobody."""

    def __init__(self, world_size: int, secret: str) -> None:
        self._world_size = world_size
        self._secret = secret
        self._waiting: dict[socket.socket, _Guest] = {}
        self._admitted: dict[int, _Guest] = {}
        self._refused: list[str] = []

    def receive(self, key: str, segment_fd: int, sign: int, deadline: float, timeout: float, watch: Watch) -> list[int]:
        """The file descriptors of the world: the segment's, and everybody's sign of life."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door, contextlib.closing(self):
            _bind(door, meeting_address(key))
            door.listen(self._world_size)
            door.setblocking(False)
            while len(self._admitted) < self._world_size - 1:
                error = watch()
                if error is not None:
                    raise error
                if time.monotonic() >= deadline:
                    raise self._missing(timeout)
                self._listen(door, deadline)
            fds = [segment_fd, sign, *(self._admitted[rank].life_fd for rank in range(1, self._world_size))]
            for guest in self._admitted.values():
                _send(guest.connection, {"world_size": self._world_size}, fds)
            return [os.dup(fd) for fd in fds]

    def _listen(self, door: socket.socket, deadline: float) -> None:
        """Hear whoever speaks next, for a moment."""
        now = time.monotonic()
        for guest in [guest for guest in self._waiting.values() if guest.until <= now]:
            self._turn_away(guest, "A process that said nothing was turned away.")
        with selectors.DefaultSelector() as selector:
            for connection in (door, *self._waiting):
                selector.register(connection, selectors.EVENT_READ)
            ready = selector.select(min(LOOK_SECONDS, max(0.0, deadline - now)))
        for each, _ in ready:
            if each.fileobj is not door:
                self._hear(self._waiting[each.fileobj])  # type: ignore[index]
                continue
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has left again
                guest = _Guest(door.accept()[0], time.monotonic() + GREET_SECONDS)
                self._waiting[guest.connection] = guest
                if _peer_uid(guest.connection) != os.getuid():
                    self._turn_away(guest, "A process of another user was turned away.")

    def _hear(self, guest: _Guest) -> None:
        message, fds = _receive(guest.connection)
        if guest.nonce:
            for fd in fds:
                os.close(fd)
            # A rank that died before it answered has come all the same: its peers lose it in their first operation.
            died = not message and _readable_now(guest.life_fd, DEATH_SECONDS)
            if not died and not _is_proof(message.get("proof"), self._secret, "guest", guest.nonce, guest.rank):
                self._turn_away(guest, "A process that does not know the job's secret was turned away.")
            elif guest.rank in self._admitted:
                self._turn_away(guest, f"A second process came as rank {guest.rank}.")
            else:
                self._admitted[guest.rank] = self._waiting.pop(guest.connection)
            return
        fault = self._fault(message, fds)
        if fault:
            for fd in fds:
                os.close(fd)
            self._turn_away(guest, fault)
            return
        guest.rank, guest.life_fd, guest.nonce = int(str(message["rank"])), fds[0], secrets.token_hex(16)
        proof = _proof(self._secret, "host", str(message["nonce"]), 0)
        _send(guest.connection, {"nonce": guest.nonce, "proof": proof})

    def _fault(self, message: dict[str, object], fds: list[int]) -> str:
        rank, believed = message.get("rank"), message.get("world_size")
        if len(fds) != 1 or type(rank) is not int or not isinstance(message.get("nonce"), str):
            return "A process that did not follow the protocol was turned away."
        if believed != self._world_size:
            return f"Rank {rank} believes in a world of {believed} ranks, rank 0 in one of {self._world_size}."
        if not 0 < rank < self._world_size:
            return f"A process came as rank {rank}, which is none of 1 to {self._world_size - 1}."
        return f"A second process came as rank {rank}." if rank in self._admitted else ""

    def _turn_away(self, guest: _Guest, fault: str) -> None:
        if fault not in self._refused:
            self._refused.append(fault)
        _send(guest.connection, {"refused": fault})
        del self._waiting[guest.connection]
        guest.close()

    def _missing(self, timeout: float) -> RendezvousError:
        dead = [rank for rank, guest in self._admitted.items() if _readable_now(guest.life_fd)]
        missing = tuple(rank for rank in range(1, self._world_size) if rank not in self._admitted or rank in dead)
        story = (
            f"waited {timeout:.1f} s, but of {self._world_size} ranks {_list(missing)} did not come."
            f"{''.join(' ' + each for each in self._refused)} Were they started, on this host, as this user, "
            "with the same job_id, secret and world size?"
        )
        for guest in self._admitted.values():
            _send(guest.connection, {"story": story, "missing": list(missing)})
        return RendezvousError(f"rank 0 {story}", missing)

    def close(self) -> None:
        for guest in (*self._waiting.values(), *self._admitted.values()):
            guest.close()


def _bind(door: socket.socket, address: str) -> None:
    try:
        door.bind(address)
    except OSError as error:
        raise RendezvousError(
            f"{_holder(address)} Give each job its own DistributedConfig.job_id (or MURMURA_JOB_ID)."
        ) from error


def _holder(address: str) -> str:
    """Who has the name that this world wants."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visit:
        visit.setblocking(False)
        try:
            visit.connect(address)
            uid = _peer_uid(visit)
        except OSError:  # it has left, or is too busy to say
            return "another world is just being set up under the same name."
    if uid == os.getuid():
        return "another world of this user is just being set up under the same name."
    return f"a process of another user (uid {uid}) holds the name under which this world would meet."


def _visit(
    key: str, secret: str, rank: int, world_size: int, sign: int, deadline: float, timeout: float, watch: Watch
) -> list[int]:
    def give_up(why: str, missing: tuple[int, ...] = ()) -> RendezvousError:
        return RendezvousError(f"rank {rank} waited {timeout:.1f} s {why}", missing)

    def answer(until: float) -> tuple[dict[str, object], list[int]] | None:
        while not _readable(host, min(until, time.monotonic() + LOOK_SECONDS)):
            error = watch()
            if error is not None:
                raise error
            if time.monotonic() >= until:
                return None
        return _receive(host)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as host:
        host.setblocking(False)  # a full queue at the door must not hold us up beyond the deadline
        pause = 0.001
        while True:
            try:
                host.connect(meeting_address(key))
                break
            except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
                error = watch()
                if error is not None:
                    raise error from None
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
        nonce = secrets.token_hex(16)
        _send(host, {"rank": rank, "world_size": world_size, "nonce": nonce}, [sign])
        heard = answer(deadline + VERDICT_SECONDS)
        if heard is not None and "nonce" in heard[0]:
            if not _is_proof(heard[0].get("proof"), secret, "host", nonce, 0):
                raise RendezvousError(
                    f"rank {rank} found at its meeting point a rank 0 that does not know the job's secret. Give all "
                    "ranks the same secret, or this job a job_id of its own.",
                    (0,),
                )
            _send(host, {"proof": _proof(secret, "guest", str(heard[0]["nonce"]), rank)})
            heard = answer(deadline + VERDICT_SECONDS)
        if heard is None:
            raise give_up("for the other ranks to come to rank 0. Its own error names those that did not.")
        message, fds = heard
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


def _proof(secret: str, role: str, nonce: str, rank: int) -> str:
    """What only those who know the secret can make of `nonce`; the name of the socket tells nothing of it."""
    return hmac.new(secret.encode(), f"{role}:{nonce}:{rank}".encode(), hashlib.sha256).hexdigest()


def _is_proof(told: object, secret: str, role: str, nonce: str, rank: int) -> bool:
    return isinstance(told, str) and told.isascii() and hmac.compare_digest(told, _proof(secret, role, nonce, rank))


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _readable(connection: socket.socket, deadline: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, deadline - time.monotonic())))


def _readable_now(fd: int, seconds: float = 0.0) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def _send(connection: socket.socket, message: dict[str, object], fds: list[int] | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):  # it left, or does not listen
        connection.sendmsg([json.dumps(message).encode()], rights, socket.MSG_DONTWAIT)


def _receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """What was said and handed over; an empty message if it was not in the language of the protocol."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, 4096, MAX_RANKS + 2, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return {}, []
    try:
        message = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        message = {}
    return (message if isinstance(message, dict) else {}), list(fds)


def _list(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
