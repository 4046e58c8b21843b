"""Ranks as processes of this host, started from a server process that has already imported torch.

The server belongs to Python's multiprocessing; it is started by the first call, ends with this process, and makes
later worlds start in milliseconds. Ranks never fork a process that has run torch.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from murmura.errors import MurmuraError, PeerLost, UsageError
from murmura.launch.outcomes import Outcome, as_raised, root_cause, stuck
from murmura.launch.plan import num_cores
from murmura.transports.base import Transport
from murmura.transports.hierarchical import HierarchicalTransport
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import file_store
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.types import TransportKind

LAST_WORDS_SECONDS = 5.0  # for the other ranks to say what the end of one of them meant to them
INTERRUPTED = 130  # exit status of a rank that was interrupted, as a shell gives it


@dataclass(frozen=True)
class _Birth:
    """What a rank is told at its start; the function and its arguments are pickled apart, by value."""

    rank: int
    world_size: int
    job: str
    work: bytes
    hosts: Sequence[int] | None
    timeout: float
    num_threads: int
    transport: TransportKind
    store_file: str  # where ranks of a process group meet


def run_processes(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    hosts: Sequence[int] | None,
    timeout: float,
    transport: TransportKind = TransportKind.SHARED_MEMORY,
) -> list[Any]:
    """See `run_world`."""
    work = _pickle_work(fn, args)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "murmura"])
    job = uuid.uuid4().hex
    num_threads = max(1, num_cores() // world_size)
    processes: list[Any] = []
    pipes: dict[Any, int] = {}
    outcomes: list[Outcome] = []
    folder = tempfile.mkdtemp(prefix="murmura-") if transport is not TransportKind.SHARED_MEMORY else ""
    store_file = os.path.join(folder, "store")
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            birth = _Birth(rank, world_size, job, work, hosts, timeout, num_threads, transport, store_file)
            process = context.Process(target=_live, args=(birth, theirs), name=f"murmura-rank{rank}", daemon=True)
            _start(process)
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        _collect(processes, pipes, outcomes, timeout)
        failure = root_cause(outcomes)
        if failure is not None:
            _collect(processes, pipes, outcomes, min(timeout, LAST_WORDS_SECONDS), all_of_them=True)
            failure = root_cause(outcomes)
            assert failure is not None
            raise as_raised(failure, world_size)
        if pipes:
            raise stuck(sorted(pipes.values()), timeout, "it was killed")
        return [outcome.result for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _pickle_work(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """fn and args as bytes; a `UsageError` if another process could not import fn."""
    name = getattr(fn, "__qualname__", repr(fn))
    advice = (
        "Move it to the top level of a module, or of a script that is run as a file; or use kind='threads', which "
        "takes any function."
    )
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    if getattr(fn, "__module__", None) == "__main__" and not (main_file and os.path.exists(main_file)):
        raise UsageError(
            f"{name} was defined in an interactive session, so the processes of the ranks cannot import it. {advice}"
        )
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(f"the processes of the ranks cannot import {name} ({error}). {advice}") from error
    try:
        return pickle.dumps((fn, tuple(args)))
    except Exception as error:  # whatever an argument's own pickling raises
        raise UsageError(f"the arguments for {name} cannot be pickled for the ranks' processes: {error}") from error


def _start(process: Any) -> None:
    try:
        process.start()
    except RuntimeError as error:
        if "bootstrapping phase" not in str(error):
            raise
        raise UsageError(
            "run_world(kind='processes') was called while a rank's process was importing this script. "
            'Put the call under `if __name__ == "__main__":`.'
        ) from error


def _collect(
    processes: Sequence[Any],
    pipes: dict[Any, int],
    outcomes: list[Outcome],
    timeout: float,
    *,
    all_of_them: bool = False,
) -> None:
    """Take outcomes until all are in or one has failed (unless `all_of_them`), or nobody ends for `timeout`."""
    last = time.monotonic()
    while pipes:
        for ready in multiprocessing.connection.wait(list(pipes), timeout=0.5):
            rank = pipes.pop(ready)
            outcomes.append(_hear(rank, ready, processes[rank]))
            last = time.monotonic()
        if (outcomes or all_of_them) and time.monotonic() - last > timeout:
            return
        if not all_of_them and any(outcome.error is not None for outcome in outcomes):
            return


def _hear(rank: int, pipe: Any, process: Any) -> Outcome:
    """What a rank said at its end; if it said nothing, how its process ended."""
    try:
        with pipe:
            said = pipe.recv_bytes()
    except EOFError:
        process.join(LAST_WORDS_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        elif code == INTERRUPTED:
            return Outcome(rank, error=KeyboardInterrupt())
        else:
            how = f"exited with status {code} before its function returned; its own output says why"
        return Outcome(rank, error=PeerLost(f"rank {rank} {how}.", peer=rank), crashed=True)
    try:
        result, error, trace = pickle.loads(said)
    except Exception as failure:  # whatever an object's own unpickling raises
        return Outcome(
            rank, error=MurmuraError(f"what rank {rank} returned or raised cannot be unpickled: {failure!r}")
        )
    return Outcome(rank, result, error, trace)


def _end(processes: Sequence[Any]) -> None:
    """See all processes off: those that are still there are asked to go, then killed."""
    for process in processes:
        if process.exitcode is None:
            process.join(0.2)
    for end, patience in (("terminate", 1.0), ("kill", 5.0)):
        alive = [process for process in processes if process.exitcode is None]
        for process in alive:
            getattr(process, end)()
        for process in alive:
            process.join(patience)
    for process in processes:
        process.close()


# In the rank's process


def _live(birth: _Birth, pipe: Any) -> None:
    """The life of a rank."""
    threading.Thread(target=_die_with_parent, name="murmura-orphan-watch", daemon=True).start()
    torch.set_num_threads(birth.num_threads)
    try:
        said = _work(birth)
    except KeyboardInterrupt:  # the parent has been interrupted too, and speaks for all
        os._exit(INTERRUPTED)
    with pipe:
        pipe.send_bytes(said)


def _work(birth: _Birth) -> bytes:
    try:
        fn, args = _unpickle_work(birth.work)
        with _join(birth) as transport:
            result = fn(transport, *args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # carried to the caller of run_world
        return _pickle_error(error)
    try:
        return pickle.dumps((result, None, ""))
    except Exception as error:  # whatever a result's own pickling raises
        return _pickle_error(UsageError(f"the result of rank {birth.rank} cannot be pickled: {error}"))


def _join(birth: _Birth) -> Transport:
    rank, size = birth.rank, birth.world_size
    if birth.transport is TransportKind.SHARED_MEMORY:
        return SharedMemoryTransport.join(birth.job, rank, size, hosts=birth.hosts, timeout=birth.timeout)
    store = file_store(birth.store_file, size)
    if birth.transport is TransportKind.HIERARCHICAL:
        return HierarchicalTransport.join(store, rank, size, hosts=birth.hosts, timeout=birth.timeout)
    return ProcessGroupTransport.join(
        store,
        rank,
        size,
        backend=birth.transport,
        hosts=birth.hosts,
        timeout=birth.timeout,
    )


def _unpickle_work(work: bytes) -> Any:
    try:
        return pickle.loads(work)
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"the process of the rank cannot import the function it should run: {error}. Move it to the top level of "
            "a module, or use kind='threads'."
        ) from error


def _pickle_error(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error))
    try:
        said = pickle.dumps((None, error, trace))
        pickle.loads(said)
    except Exception:  # an exception that does not survive pickling: its words do
        return pickle.dumps((None, MurmuraError(f"{type(error).__name__}: {error}"), trace))
    return said


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
