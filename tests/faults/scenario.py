"""A scenario: ranks that play an act, as processes or threads, and a director who injects a fault and hears each rank.

A rank says words through its pipe ("ready") and at its end a `Report` in plain data. The director acts on those words,
so nothing depends on a sleep. Leaving a world ends its processes by their pid and checks that nothing is left.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from traces import assert_nothing_left, await_state, ports_of, segments_of, shm_files_of, watch_sockets

from murmura import InProcessTransport, MurmuraError, SharedMemoryTransport, Transport

WITHIN = 25.0  # seconds after which a director no longer waits for a rank: a failed test, never a race
NUM_HEALTHY = 4  # operations before a fault

Act = Callable[..., Any]


@dataclass(frozen=True)
class Again:
    """What a later call on a broken transport did."""

    call: str
    kind: str
    peer: int | None
    seconds: float


@dataclass(frozen=True)
class Report:
    """How a rank ended, as it says itself; times are of the one monotonic clock of the machine."""

    own: int
    result: Any = None
    kind: str = ""  # name of the exception's class; "" if it returned
    family: tuple[str, ...] = ()  # names of all its classes
    message: str = ""
    rank: int | None = None
    peer: int | None = None
    operation: str | None = None
    calls: dict[int, str] = field(default_factory=dict)
    missing: tuple[int, ...] = ()
    called: float = 0.0  # when the call that failed began
    ended: float = 0.0
    later: tuple[Again, ...] = ()
    ports: tuple[str, ...] = ()
    warnings: tuple[tuple[float, str], ...] = ()  # what murmura logged, and when

    @property
    def waited(self) -> float:
        return self.ended - self.called


class Stage:
    """What an act has: its transport, and a line to the director. An act may go on with a part of the world."""

    def __init__(self, pipe: Connection, transport: Transport) -> None:
        self.transport = transport
        self.called = 0.0
        self.tries_again = True  # after an error
        self.curtain = contextlib.ExitStack()
        self._pipe = pipe

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    def tell(self, word: str, **facts: Any) -> None:
        self._pipe.send((word, facts))

    def hear(self) -> str:
        """Block until the director says a word."""
        return str(self._pipe.recv())

    def mark(self) -> None:
        """The call about to be made is the one whose waiting counts."""
        self.called = time.monotonic()

    def leave_open(self) -> None:
        """Whatever happens from now on, the transport is not closed."""
        self.curtain.pop_all()


# In the rank


def play(
    pipe: Connection, transport: Transport, act: Act, args: Sequence[Any], sockets: Sequence[str] | None = None
) -> None:
    """Play `act` on `transport` and report how it ended; `sockets` fills as sockets are opened."""
    stage = Stage(pipe, transport)
    warnings: list[tuple[float, str]] = []
    report = Report(transport.rank)
    try:
        with stage.curtain, _logged(transport.rank, warnings):
            stage.curtain.enter_context(transport)
            try:
                result = act(stage, *args)
                report = Report(transport.rank, result, ended=time.monotonic())
            except BaseException as error:
                report = _describe(transport.rank, error, stage.called, time.monotonic())
                if stage.tries_again and isinstance(error, MurmuraError | KeyboardInterrupt):
                    report = _with(report, later=_try_again(stage.transport))
                raise
    except SystemExit:
        if threading.current_thread() is threading.main_thread():
            raise  # the process ends with its status; a thread just ends
    except BaseException:  # it is in the report
        pass
    finally:
        ports = [] if sockets is None else [*sockets, *ports_of()]
        with contextlib.suppress(BrokenPipeError, OSError):  # the director may have left
            pipe.send(("report", {"report": _with(report, ports=tuple(ports), warnings=tuple(warnings))}))
            pipe.close()


def join_and_play(
    pipe: Connection, job: str, rank: int, world_size: int, timeout: float, act: Act, args: Sequence[Any]
) -> None:
    """The life of a rank in a process of its own."""
    torch.set_num_threads(1)
    sockets = watch_sockets()
    pipe.send(("joining", {}))
    began = time.monotonic()
    try:
        transport = SharedMemoryTransport.join(job, rank, world_size, timeout=timeout)
    except MurmuraError as error:
        report = _describe(rank, error, began, time.monotonic())
        pipe.send(("report", {"report": _with(report, ports=(*sockets, *ports_of()))}))
        return
    pipe.send(("joined", {"inodes": segments_of(), "files": shm_files_of(), "ports": sockets + ports_of()}))
    play(pipe, transport, act, args, sockets)


@contextlib.contextmanager
def _logged(rank: int, records: list[tuple[float, str]]) -> Iterator[None]:
    """Note what murmura logs about `rank`; ranks that are threads share the logger."""

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(f"rank {rank} "):
                records.append((time.monotonic(), record.getMessage()))

    handler = Noting()
    logging.getLogger("murmura").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("murmura").removeHandler(handler)


def _describe(own: int, error: BaseException, called: float, ended: float) -> Report:
    names = ("rank", "peer", "operation", "calls", "missing")
    return Report(
        own,
        kind=type(error).__name__,
        family=tuple(each.__name__ for each in type(error).__mro__),
        message=_words(error),
        called=called,
        ended=ended,
        **{name: getattr(error, name) for name in names if hasattr(error, name)},
    )


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an error may be as broken as anything else
        return ""


def _with(report: Report, **changes: Any) -> Report:
    return Report(**{**vars(report), **changes})


def _try_again(transport: Transport) -> tuple[Again, ...]:
    """Call all sorts of operations on a transport that has failed."""
    x = torch.ones(8)
    peer = (transport.rank + 1) % transport.world_size
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: transport.all_reduce(x),
        "barrier": lambda: transport.barrier(),
        "broadcast": lambda: transport.broadcast(x),
        "send": lambda: transport.send(x, peer),
        "recv": lambda: transport.recv(x, peer),
        "all_reduce(async_op)": lambda: transport.all_reduce(x, async_op=True).wait(WITHIN),
        "split": lambda: transport.split("again"),
    }
    outcomes = []
    for name, call in calls.items():
        began = time.monotonic()
        try:
            call()
        except BaseException as error:
            kind, named = type(error).__name__, getattr(error, "peer", None)
        else:
            kind, named = "", None
        outcomes.append(Again(name, kind, named, time.monotonic() - began))
    return tuple(outcomes)


# The director's side


class Actor:
    """One rank, or any other process or thread that speaks through a pipe, seen by the director."""

    def __init__(self, name: str, target: Callable[..., None], *args: Any, thread: bool = False) -> None:
        self.name = name
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self._pipe, theirs = multiprocessing.Pipe()
        if thread:
            self._life: Any = threading.Thread(target=target, args=(theirs, *args), name=name, daemon=True)
            self._life.start()
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "murmura"])
        self._life = context.Process(target=target, args=(theirs, *args), name=name, daemon=True)
        self._life.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._life.pid)

    @property
    def exitcode(self) -> int | None:
        """How the process ended, once it has."""
        self._life.join(WITHIN)
        return self._life.exitcode  # type: ignore[no-any-return]

    def await_word(self, word: str, within: float = WITHIN) -> dict[str, Any]:
        """The facts that came with `word`, once it has been said."""
        give_up = time.monotonic() + within
        while not any(said == word for said, _ in self.heard):
            so_far = f"{self.name} has not said {word!r}, only {self.heard}"
            assert self._pipe.poll(max(0.0, give_up - time.monotonic())), so_far
            try:
                self.heard.append(self._pipe.recv())
            except (EOFError, ConnectionResetError):
                raise AssertionError(f"{so_far}; and it has left") from None
        return next(facts for said, facts in self.heard if said == word)

    def report(self, within: float = WITHIN) -> Report:
        report = self.await_word("report", within)["report"]
        assert isinstance(report, Report)
        return report

    def say(self, word: str) -> None:
        self._pipe.send(word)

    def signal(self, number: int) -> float:
        """Send a signal by pid; the moment it was sent."""
        sent = time.monotonic()
        os.kill(self.pid, number)
        return sent

    def end(self) -> None:
        """End it, whatever it does; a thread ends when it has nothing more to hear."""
        self._pipe.close()
        if isinstance(self._life, threading.Thread):
            self._life.join(WITHIN)
            assert not self._life.is_alive(), f"{self.name} goes on"
            return
        if self._life.exitcode is None:
            self._life.kill()
        self._life.join(WITHIN)
        assert self._life.exitcode is not None, f"{self.name} cannot be ended"


class World:
    """The ranks of a scenario, all playing `act(stage, *args)`; `kind` is "processes" or "threads"."""

    def __init__(
        self,
        kind: str,
        world_size: int,
        act: Act,
        *args: Any,
        timeout: float = 20.0,
        only: Sequence[int] | None = None,
    ) -> None:
        self.kind = kind
        self.world_size = world_size
        self.job = uuid.uuid4().hex
        self.actors: dict[int, Actor] = {}
        self._play = (timeout, act, args)
        if kind == "threads":
            for transport in InProcessTransport.create_group(world_size, timeout=timeout):
                name = f"rank {transport.rank}"
                self.actors[transport.rank] = Actor(name, play, transport, act, args, thread=True)
            return
        for rank in range(world_size) if only is None else only:
            self.start(rank)

    def start(self, rank: int) -> Actor:
        """Start a rank's process."""
        self.actors[rank] = Actor(f"rank {rank}", join_and_play, self.job, rank, self.world_size, *self._play)
        return self.actors[rank]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self.actors.values():
            actor.end()
        if self.kind == "processes" and error[0] is None:
            assert_nothing_left(self.job, self._segments(), [actor.pid for actor in self.actors.values()])

    def _segments(self) -> set[int]:
        """The inode of the segment, as those who had joined said; nobody ever held a file or a port."""
        inodes = set()
        for actor in self.actors.values():
            for joined in (facts for word, facts in actor.heard if word == "joined"):
                assert len(joined["inodes"]) == 1
                assert not joined["files"]
                assert not joined["ports"]
                inodes |= joined["inodes"]
        assert len(inodes) <= 1, "the ranks do not share one segment"
        return inodes

    def await_word(self, word: str, *ranks: int) -> None:
        """Return once each of `ranks` (by default all) has said `word`; look at what the processes hold by then."""
        for rank in ranks or self.actors:
            self.actors[rank].await_word(word)
        if self.kind == "processes":
            for actor in self.actors.values():
                actor.await_word("joined")
                assert ports_of(actor.pid) == []
                assert shm_files_of(actor.pid) == []
            assert self._segments()

    def kill(self, rank: int) -> float:
        """SIGKILL a rank and see that it died of it; the moment it was sent."""
        sent = self.actors[rank].signal(signal.SIGKILL)
        assert self.actors[rank].exitcode == -signal.SIGKILL
        return sent

    def stop(self, rank: int) -> float:
        """SIGSTOP a rank and see that it has stopped; the moment it was sent."""
        sent = self.actors[rank].signal(signal.SIGSTOP)
        await_state(self.actors[rank].pid, "T")
        return sent

    def reports(self, *ranks: int) -> list[Report]:
        """How each of `ranks` ended, by default how all did."""
        return [self.actors[rank].report() for rank in ranks or sorted(self.actors)]

    def others(self, rank: int) -> list[int]:
        return [other for other in range(self.world_size) if other != rank]
