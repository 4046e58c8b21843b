"""The rendezvous of the processes of one host: rank 0 listens, the others connect, and all get the shared segment.

The socket is an abstract Unix socket: it has no file and no port, and ends with the process that holds it. Both sides
ask the kernel who the other is and talk only to processes of their own user. Each rank sends a *life descriptor*, a
file descriptor that becomes readable when the rank dies, and receives the segment's and those of all ranks.
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
from typing import TypeGuard

from murmura.errors import RendezvousError
from murmura.transports.liveness import Liveness, open_life_fd
from murmura.transports.watched_store import Watch, nobody

GREET_SECONDS = 5.0  # for a client to say who it is
LOOK_SECONDS = 0.1  # between two looks whether somebody can still come
DEATH_SECONDS = 0.2  # between the end of a process's connections and that of itself
ANSWER_SECONDS = 1.0  # after its own deadline, for rank 0 to say who is missing
MAX_RANKS = 250  # a message carries at most 253 file descriptors
MAX_BYTES = 2**17  # of a message, which may hold the claims of all ranks


@dataclass(frozen=True)
class Handles:
    """The file descriptors of a rank after the rendezvous: the segment's memfd, and every rank's life descriptor."""

    segment_fd: int
    life_fds: tuple[int, ...]
    own_life: int  # to be kept open as long as this rank lives; -1 if there is no need
    claims: tuple[str, ...]  # what each rank said of itself

    def close(self) -> None:
        for fd in (self.segment_fd, *self.life_fds, self.own_life):
            if fd >= 0:
                os.close(fd)


def socket_address(key: str) -> str:
    """The abstract socket address of the job that `key` names; different users never share one."""
    return "\0murmura-" + hashlib.blake2b(f"{os.getuid()}:{key}".encode(), digest_size=16).hexdigest()


def meet(
    key: str,
    rank: int,
    world_size: int,
    segment_fd: int | None,
    timeout: float,
    *,
    secret: str = "",
    watch: Watch = nobody,
    claim: str = "",
) -> Handles:
    """Meet the other ranks of the job `key`; rank 0 brings the segment. Raises `RendezvousError` at the deadline.

    All must know the same `secret`. `watch` tells of ranks that cannot come any more. `claim` is told to all ranks.
    """
    deadline = time.monotonic() + timeout
    life_fd, own_life = open_life_fd()
    try:
        if rank == 0:
            assert segment_fd is not None
            server = _Server(world_size, secret, claim)
            fds, claims = server.serve(key, segment_fd, life_fd, deadline, timeout, watch)
        else:
            fds, claims = _join_server(key, secret, rank, world_size, claim, life_fd, deadline, timeout, watch)
    except BaseException:
        if own_life >= 0:
            os.close(own_life)
        raise
    finally:
        os.close(life_fd)
    return Handles(fds[0], tuple(fds[1:]), own_life, tuple(claims))


def sign_in(
    key: str, rank: int, world_size: int, claim: str, timeout: float, *, secret: str = "", watch: Watch = nobody
) -> tuple[str, ...]:
    """Meet the other ranks of the job `key` only to hear the claims of all, in rank order."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        met = meet(key, rank, world_size, nothing, timeout, secret=secret, watch=watch, claim=claim)
    finally:
        os.close(nothing)
    met.close()
    return met.claims


@dataclass
class _Client:
    """A process that has connected; it joins once it has proved that it knows the secret."""

    connection: socket.socket
    until: float  # when it is refused if it has not sent anything
    rank: int = -1
    life_fd: int = -1
    nonce: str = ""  # what it was asked to prove
    claim: str = ""

    def close(self) -> None:
        self.connection.close()
        if self.life_fd >= 0:
            os.close(self.life_fd)
            self.life_fd = -1


class _Server:
    """Rank 0's side: it serves all clients at once, so that a silent one delays nobody."""

    def __init__(self, world_size: int, secret: str, claim: str) -> None:
        self._world_size = world_size
        self._secret = secret
        self._claim = claim
        self._waiting: dict[socket.socket, _Client] = {}
        self._joined: dict[int, _Client] = {}
        self._refused: list[str] = []

    def serve(
        self, key: str, segment_fd: int, life_fd: int, deadline: float, timeout: float, watch: Watch
    ) -> tuple[list[int], list[str]]:
        """Serve until all ranks have joined; return the segment's descriptor, all life descriptors, and all claims."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, contextlib.closing(self):
            _bind(listener, socket_address(key))
            listener.listen(self._world_size)
            listener.setblocking(False)
            while len(self._joined) < self._world_size - 1:
                error = watch()
                if error is not None:
                    for client in self._joined.values():
                        _send(client.connection, {"refused": str(error)})
                    raise error
                if time.monotonic() >= deadline:
                    raise self._missing(timeout)
                self._serve_once(listener, deadline)
            fds = [segment_fd, life_fd, *(self._joined[rank].life_fd for rank in range(1, self._world_size))]
            claims = [self._claim, *(self._joined[rank].claim for rank in range(1, self._world_size))]
            for client in self._joined.values():
                _send(client.connection, {"world_size": self._world_size, "claims": claims}, fds)
            return [os.dup(fd) for fd in fds], claims

    def _serve_once(self, listener: socket.socket, deadline: float) -> None:
        """Accept and read what arrives within LOOK_SECONDS."""
        now = time.monotonic()
        silent = [client for client in self._waiting.values() if not client.nonce]
        late = [client for client in self._waiting.values() if client.until <= now]
        for client in late or silent[: max(0, len(silent) - MAX_RANKS)]:  # a crowd would take all file descriptors
            self._refuse(client, "A process that said nothing was refused.")
        with selectors.DefaultSelector() as selector:
            for connection in (listener, *self._waiting):
                selector.register(connection, selectors.EVENT_READ)
            ready = selector.select(min(LOOK_SECONDS, max(0.0, deadline - now)))
        for each, _ in ready:
            if each.fileobj is not listener:
                self._read(self._waiting[each.fileobj])  # type: ignore[index]
                continue
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has left again
                client = _Client(listener.accept()[0], time.monotonic() + GREET_SECONDS)
                self._waiting[client.connection] = client
                if peer_ids(client.connection)[1] != os.getuid():
                    self._refuse(client, "A process of another user was refused.")

    def _read(self, client: _Client) -> None:
        message, fds = _receive(client.connection)
        if client.nonce:
            for fd in fds:
                os.close(fd)
            # A rank that died before it answered has come all the same: its peers lose it in their first operation.
            died = not message and _readable_now(client.life_fd, DEATH_SECONDS) and _is_dead(client.connection)
            if died:  # it has proved nothing, so nothing is sent to a child that it may have left the connection to
                client.connection.shutdown(socket.SHUT_RDWR)
            if not died and not _is_proof(message.get("proof"), self._secret, "client", client.nonce, client.rank):
                self._refuse(client, "A process that does not know the job's secret was refused.")
            elif client.rank in self._joined:
                self._refuse(client, f"A second process came as rank {client.rank}.")
            else:
                self._joined[client.rank] = self._waiting.pop(client.connection)
            return
        fault = self._fault(message, fds)
        if fault:
            for fd in fds:
                os.close(fd)
            self._refuse(client, fault)
            return
        client.rank, client.life_fd, client.nonce = int(str(message["rank"])), fds[0], secrets.token_hex(16)
        client.claim = str(message.get("claim", ""))
        proof = _proof(self._secret, "server", str(message["nonce"]), 0)
        _send(client.connection, {"nonce": client.nonce, "proof": proof})

    def _fault(self, message: dict[str, object], fds: list[int]) -> str:
        rank, believed = message.get("rank"), message.get("world_size")
        nonce = message.get("nonce")
        if len(fds) != 1 or type(rank) is not int or type(believed) is not int or not _is_ascii(nonce):
            return "A process that did not follow the protocol was refused."
        if believed != self._world_size:
            return f"Rank {rank} believes in a world of {believed} ranks, rank 0 in one of {self._world_size}."
        if not 0 < rank < self._world_size:
            return f"A process came as rank {rank}, which is none of 1 to {self._world_size - 1}."
        return f"A second process came as rank {rank}." if rank in self._joined else ""

    def _refuse(self, client: _Client, fault: str) -> None:
        if fault not in self._refused:
            self._refused.append(fault)
        _send(client.connection, {"refused": fault})
        del self._waiting[client.connection]
        client.close()

    def _missing(self, timeout: float) -> RendezvousError:
        dead = [rank for rank, client in self._joined.items() if _readable_now(client.life_fd)]
        missing = tuple(rank for rank in range(1, self._world_size) if rank not in self._joined or rank in dead)
        story = (
            f"waited {timeout:.1f} s, but of {self._world_size} ranks {_list(missing)} did not come."
            f"{''.join(' ' + each for each in self._refused)} Were they started, on this host, as this user, "
            "with the same job_id, secret and world size?"
        )
        for client in self._joined.values():
            _send(client.connection, {"story": story, "missing": list(missing)})
        return RendezvousError(f"rank 0 {story}", missing)

    def close(self) -> None:
        for client in (*self._waiting.values(), *self._joined.values()):
            client.close()


def _bind(listener: socket.socket, address: str) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        raise RendezvousError(
            f"{_holder(address)} Give each job its own DistributedConfig.job_id (or MURMURA_JOB_ID)."
        ) from error


def _holder(address: str) -> str:
    """Say who holds the socket address of this world."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
            uid = peer_ids(probe)[1]
        except OSError:  # it has left, or is too busy to say
            return "another world is just being set up under the same name."
    if uid == os.getuid():
        return "another world of this user is just being set up under the same name."
    return f"a process of another user (uid {uid}) holds the name under which this world would meet."


def _join_server(
    key: str,
    secret: str,
    rank: int,
    world_size: int,
    claim: str,
    life_fd: int,
    deadline: float,
    timeout: float,
    watch: Watch,
) -> tuple[list[int], list[str]]:
    def give_up(why: str, missing: tuple[int, ...] = ()) -> RendezvousError:
        return RendezvousError(f"rank {rank} waited {timeout:.1f} s {why}", missing)

    def answer(until: float) -> tuple[dict[str, object], list[int]] | None:
        while not _readable(server, min(until, time.monotonic() + LOOK_SECONDS)):
            error = watch()
            if error is not None:
                raise error
            if time.monotonic() >= until:
                return None
        return _receive(server)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.setblocking(False)  # a full backlog must not block beyond the deadline
        pause = 0.001
        while True:
            try:
                server.connect(socket_address(key))
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
                time.sleep(pause)  # nothing to wait on: the socket does not exist yet
                pause = min(2 * pause, 0.05)
        server.setblocking(True)
        if peer_ids(server)[1] != os.getuid():
            raise RendezvousError(
                f"rank {rank} found a process of another user at its rendezvous and told it nothing. "
                "Choose another job_id, and tell whoever runs this machine."
            )
        nonce = secrets.token_hex(16)
        _send(server, {"rank": rank, "world_size": world_size, "nonce": nonce, "claim": claim}, [life_fd])
        heard = answer(deadline + ANSWER_SECONDS)
        is_rank_zero = heard is not None and _is_proof(heard[0].get("proof"), secret, "server", nonce, 0)
        if heard is not None and is_rank_zero:
            _send(server, {"proof": _proof(secret, "client", str(heard[0].get("nonce")), rank)})
            heard = answer(deadline + ANSWER_SECONDS)
        if heard is None:
            raise give_up("for the other ranks to come to rank 0. Its own error names those that did not.")
        message, fds = heard
    claims = message.get("claims")
    if is_rank_zero and len(fds) == world_size + 1 and isinstance(claims, list) and len(claims) == world_size:
        return fds, [str(each) for each in claims]
    for fd in fds:
        os.close(fd)
    if "missing" in message:
        missing = message["missing"]
        raise RendezvousError(
            f"rank {rank} {message.get('story')}", tuple(missing) if isinstance(missing, list) else ()
        )
    if "refused" in message:
        raise RendezvousError(f"rank {rank} was refused by rank 0: {message['refused']}")
    if message and not is_rank_zero:
        raise RendezvousError(
            f"rank {rank} found at its rendezvous a rank 0 that does not know the job's secret. Give all ranks the "
            "same secret, or this job a job_id of its own.",
            (0,),
        )
    raise RendezvousError(
        f"rank {rank} lost rank 0 while the world was being set up. Rank 0's own error says why.", (0,)
    )


def _proof(secret: str, role: str, nonce: str, rank: int) -> str:
    """Sign `nonce` with the secret; nothing else, not even the socket's name, depends on the secret."""
    return hmac.new(secret.encode(), f"{role}:{nonce}:{rank}".encode(), hashlib.sha256).hexdigest()


def _is_proof(told: object, secret: str, role: str, nonce: str, rank: int) -> bool:
    return _is_ascii(told) and hmac.compare_digest(told, _proof(secret, role, nonce, rank))


def _is_ascii(told: object) -> TypeGuard[str]:
    return isinstance(told, str) and told.isascii()


def peer_ids(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _is_dead(connection: socket.socket) -> bool:
    with contextlib.closing(Liveness({0: peer_ids(connection)[0]})) as process:
        return bool(process.dead())


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
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):  # it left, or does not read
        connection.sendmsg([json.dumps(message).encode()], rights, socket.MSG_DONTWAIT)


def _receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Return the message and its file descriptors; the message is empty if the other side has left."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, MAX_BYTES, MAX_RANKS + 2, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return {}, []
    try:
        message = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        message = None
    return (message if isinstance(message, dict) else {"unreadable": True}), list(fds)


def _list(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
