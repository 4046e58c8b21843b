"""`run_world` with processes: ranks are forked from a server process that has already imported torch.

The server is multiprocessing's forkserver: the first call starts it, later worlds start in milliseconds, and it ends
with this process. No rank is forked from a process that has run torch.
"""

from __future__ import annotations

import errno
import functools
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
import torch.distributed as dist

from murmura.errors import MurmuraError, PeerLost, UsageError
from murmura.launch.limits import explain_os_errors
from murmura.launch.outcomes import Outcome, as_raised, collect, failed, unfinished
from murmura.launch.root_cause import describe_status, root_cause
from murmura.transports.base import Transport
from murmura.transports.devices import nccl_gpu
from murmura.transports.hierarchical import HierarchicalTransport
from murmura.transports.host import num_cores
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import file_store
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.types import TransportKind

GRACE_SECONDS = 5.0  # after a failure: for the other ranks to notice it and to report their own errors
INTERRUPTED = 130  # exit status of a rank that was interrupted, as a shell gives it


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs to start; the function and its arguments are pickled separately, so that errors name them."""

    rank: int
    world_size: int
    job: str
    work: bytes
    hosts: Sequence[int] | None
    timeout: float
    num_threads: int
    transport: TransportKind
    store_file: str  # the rendezvous of process groups


FORK_SERVER_SECONDS = 5.0  # for a fork server that is ending to be gone


def run_processes(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    hosts: Sequence[int] | None,
    timeout: float,
    transport: TransportKind = TransportKind.SHARED_MEMORY,
) -> list[Any]:
    """Run `fn` on ranks that are processes; see `run_world`."""
    work = _pickle_work(fn, args)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "murmura"])
    job = uuid.uuid4().hex
    num_threads = max(1, num_cores() // world_size)
    processes: list[Any] = []
    pipes: dict[Any, int] = {}
    outcomes: list[Outcome] = []
    folder = ""
    try:
        if transport is not TransportKind.SHARED_MEMORY:
            with explain_os_errors("the ranks have no temporary folder for their store"):
                folder = tempfile.mkdtemp(prefix="murmura-")
        store_file = os.path.join(folder, "store")
        for rank in range(world_size):
            spec = RankSpec(rank, world_size, job, work, hosts, timeout, num_threads, transport, store_file)
            with explain_os_errors(f"the process of rank {rank} of {world_size} cannot be started"):
                ours, theirs = context.Pipe(duplex=False)
                pipes[ours] = rank
                with theirs:
                    name = f"murmura-rank{rank}"
                    process = context.Process(target=rank_main, args=(spec, theirs), name=name, daemon=True)
                    _start(process)
            processes.append(process)
        receive = functools.partial(_receive_all, processes, pipes)
        collect(receive, outcomes, world_size, timeout)
        failure = root_cause(failed(outcomes))
        if failure is not None:
            collect(receive, outcomes, world_size, min(timeout, GRACE_SECONDS), all_of_them=True)
            failure = root_cause(failed(outcomes))
            assert failure is not None
            raise as_raised(failure, world_size)
        if pipes:
            raise unfinished(sorted(pipes.values()), timeout, "it was killed")
        return [outcome.result for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]
    finally:
        _stop(processes)
        for pipe in pipes:
            pipe.close()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _pickle_work(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle fn and args; a `UsageError` if another process could not import fn."""
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
    """Start `process`; a fork server that is just ending, after a start that failed, is started anew."""
    deadline = time.monotonic() + FORK_SERVER_SECONDS
    while True:
        try:
            return _start_once(process)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _start_once(process: Any) -> None:
    try:
        process.start()
    except RuntimeError as error:
        if "bootstrapping phase" not in str(error):
            raise
        raise UsageError(
            "run_world(kind='processes') was called while a rank's process was importing this script. "
            'Put the call under `if __name__ == "__main__":`.'
        ) from error


def _receive_all(processes: Sequence[Any], pipes: dict[Any, int], seconds: float) -> list[Outcome]:
    """Return the outcomes of ranks that have ended, whose pipes are removed; wait at most `seconds` for the first."""
    ready = [(pipes.pop(pipe), pipe) for pipe in multiprocessing.connection.wait(list(pipes), timeout=seconds)]
    return [_receive(rank, pipe, processes[rank]) for rank, pipe in ready]


def _receive(rank: int, pipe: Any, process: Any) -> Outcome:
    """Return what a rank sent before it ended; if it sent nothing, how its process ended."""
    try:
        with pipe:
            message = pipe.recv_bytes()
    except EOFError:
        process.join(GRACE_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            how = describe_status(code)
        elif code == INTERRUPTED:
            return Outcome(rank, error=KeyboardInterrupt())
        else:
            how = f"exited with status {code} before its function returned; its own output says why"
        return Outcome(rank, error=PeerLost(f"rank {rank} {how}.", peer=rank), crashed=True)
    try:
        result, error, trace = pickle.loads(message)
    except Exception as failure:  # whatever an object's own unpickling raises
        return Outcome(
            rank, error=MurmuraError(f"what rank {rank} returned or raised cannot be unpickled: {failure!r}")
        )
    return Outcome(rank, result, error, trace)


def _stop(processes: Sequence[Any]) -> None:
    """Wait shortly for all processes; terminate, then kill those that still run."""
    for process in processes:
        if process.exitcode is None:
            process.join(0.2)
    for method, seconds in (("terminate", 1.0), ("kill", 5.0)):
        alive = [process for process in processes if process.exitcode is None]
        for process in alive:
            getattr(process, method)()
        for process in alive:
            process.join(seconds)
    for process in processes:
        if process.exitcode is not None:  # else nobody can tell its end any more: the fork server is gone
            process.close()


# In the rank's process


def rank_main(spec: RankSpec, pipe: Any) -> None:
    """Run the rank and send its pickled result or error through `pipe`."""
    threading.Thread(target=_die_with_parent, name="murmura-orphan-watch", daemon=True).start()
    torch.set_num_threads(min(spec.num_threads, torch.get_num_threads()))  # fewer if OMP_NUM_THREADS says so
    try:
        message = _work(spec)
    except KeyboardInterrupt:  # the parent was interrupted too, and reports it
        os._exit(INTERRUPTED)
    with pipe:
        pipe.send_bytes(message)


def _work(spec: RankSpec) -> bytes:
    try:
        fn, args = _unpickle_work(spec.work)
        with _join(spec) as transport:
            result = fn(transport, *args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised again by run_world
        return pickle_error(error)
    try:
        return pickle.dumps((result, None, ""))
    except Exception as error:  # whatever a result's own pickling raises
        return pickle_error(UsageError(f"the result of rank {spec.rank} cannot be pickled: {error}"))


def _join(spec: RankSpec) -> Transport:
    with explain_os_errors("this rank cannot join its world"):
        try:
            return _join_over(spec)
        except dist.DistStoreError as error:  # from the file store: an OSError in other words
            raise OSError(_errno_of(str(error)), str(error), spec.store_file) from error


def _errno_of(message: str) -> int | None:
    return next((number for number in errno.errorcode if os.strerror(number) in message), None)


def _join_over(spec: RankSpec) -> Transport:
    rank, size = spec.rank, spec.world_size
    if spec.transport is TransportKind.SHARED_MEMORY:
        return SharedMemoryTransport.join(spec.job, rank, size, hosts=spec.hosts, timeout=spec.timeout)
    if spec.transport is TransportKind.NCCL:  # which works on the current GPU, as what `fn` makes will be
        torch.cuda.set_device(nccl_gpu(rank))
    store = file_store(spec.store_file, size)
    if spec.transport is TransportKind.HIERARCHICAL:
        return HierarchicalTransport.join(store, rank, size, hosts=spec.hosts, timeout=spec.timeout)
    return ProcessGroupTransport.join(store, rank, size, kind=spec.transport, hosts=spec.hosts, timeout=spec.timeout)


def _unpickle_work(work: bytes) -> Any:
    try:
        return pickle.loads(work)
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"the process of the rank cannot import the function it should run: {error}. Move it to the top level of "
            "a module, or use kind='threads'."
        ) from error


def pickle_error(error: BaseException) -> bytes:
    """The message of a rank that failed: no result, the error, and its traceback as text."""
    trace = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps((None, error, trace))
        pickle.loads(message)
    except Exception:  # the exception does not survive pickling: send its text
        return pickle.dumps((None, MurmuraError(f"{type(error).__name__}: {error}"), trace))
    return message


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
