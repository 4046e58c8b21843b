"""Several NCCL ranks on one GPU, for tests and benchmarks: it shows that things work, not how fast several GPUs are.

NCCL refuses two ranks on one GPU of one host, but takes each process's word for its host. Told different ones, it goes
through its sockets, here over loopback. With the MPS daemon the ranks' kernels run side by side; without it they take
turns, which is right but slow.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from murmura import MurmuraError, PeerLost, ProcessGroupTransport
from murmura.launch.processes import pickle_error
from murmura.transports.rendezvous import file_store

LABEL = "one GPU, MPS, loopback sockets"
LABEL_WITHOUT_MPS = "one GPU, ranks take turns, loopback sockets"
MPS = "nvidia-cuda-mps-control"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
GRACE_SECONDS = 10.0


def nccl_variables(rank: int) -> dict[str, str]:
    """What a rank's process is told before its first CUDA call."""
    return {
        "NCCL_HOSTID": f"murmura-rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }


class OneGPU:
    """A world of `num_ranks` NCCL ranks on GPU 0, kept alive between calls of `run`; a context manager.

    A call that fails ends the world, and the next one starts another. With `mps=False`, or where the daemon cannot be
    started, the ranks' kernels take turns; `label` says which. A daemon that runs already, as `CUDA_MPS_PIPE_DIRECTORY`
    says, is used and not ended. A rank killed under MPS breaks the others' GPU contexts. `folder` is a temporary one,
    which goes with the world. A rank's waits last `timeout` seconds at most, and a call, unless it says so, `limit`.
    """

    def __init__(self, num_ranks: int, *, mps: bool = True, timeout: float = 60.0, limit: float = 300.0) -> None:
        self.num_ranks = num_ranks
        self._timeout = timeout
        self._limit = limit
        self.folder = tempfile.mkdtemp(prefix="murmura-gpu-")
        self._variables: dict[str, str] = {}
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._num_worlds = 0
        self._owns_mps = False
        has_mps = mps and (PIPE in os.environ or self._start_mps())
        if not mps and PIPE in os.environ:
            self._variables = {PIPE: os.path.join(self.folder, "none")}  # where no daemon listens
        self.label = LABEL if has_mps else LABEL_WITHOUT_MPS

    def run(self, fn: Callable[..., Any], *args: Any, limit: float | None = None) -> list[Any]:
        """Call ``fn(transport, *args)`` on every rank; the results in rank order, or the first error that a rank has.

        `fn` must be importable. A rank that has not answered after `limit` seconds is killed, with all others.
        """
        outcomes = self.outcomes(fn, *args, limit=limit)
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        if errors:
            # A peer's failure is told by the others too: what is no such echo is the cause.
            raise next((each for each in errors if not isinstance(each, PeerLost)), errors[0])
        return outcomes

    def outcomes(self, fn: Callable[..., Any], *args: Any, limit: float | None = None) -> list[Any]:
        """As `run`, but with the errors of ranks in place of their results."""
        if not self._processes:
            self._start()
        call = pickle.dumps((fn, args))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(call)
            except ConnectionError:  # it has ended since the last call
                status = self._processes[rank].exitcode
                self._stop()
                raise PeerLost(f"rank {rank} ended with status {status} between two calls.", peer=rank) from None
        deadline = time.monotonic() + (self._limit if limit is None else limit)
        try:
            outcomes = [self._receive(rank, deadline) for rank in range(self.num_ranks)]
        except BaseException:  # what the others answer must not be taken for answers to the next call
            self._stop()
            raise
        if any(isinstance(each, BaseException) for each in outcomes):
            self._stop()
        return outcomes

    def pids(self) -> list[int]:
        """The processes of the ranks, which are started if need be."""
        if not self._processes:
            self._start()
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End the ranks and the daemon; may be called again."""
        self._stop()
        if self._owns_mps:
            self._owns_mps = False
            subprocess.run([MPS], input="quit\n", text=True, env=self._environment(), timeout=30, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start_mps(self) -> bool:
        if shutil.which(MPS) is None:
            return False
        for name in ("pipe", "log"):
            os.mkdir(os.path.join(self.folder, name))
        self._variables = {
            PIPE: os.path.join(self.folder, "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.path.join(self.folder, "log"),
        }
        started = subprocess.run([MPS, "-d"], env=self._environment(), timeout=30, check=False)
        if started.returncode:
            self._variables = {}
        self._owns_mps = started.returncode == 0
        return self._owns_mps

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._variables}

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "murmura"])
        self._num_worlds += 1
        store_file = os.path.join(self.folder, f"store{self._num_worlds}")
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            variables = {**self._variables, **nccl_variables(rank)}
            args = (rank, self.num_ranks, variables, store_file, self._timeout, theirs)
            process = context.Process(target=_serve, args=args, name=f"murmura-gpu-rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _receive(self, rank: int, deadline: float) -> Any:
        pipe, process = self._pipes[rank], self._processes[rank]
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                return MurmuraError(f"rank {rank} on the GPU has not answered in time, and is killed.")
            result, error, trace = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            process.join(GRACE_SECONDS)
            return PeerLost(f"rank {rank} ended with status {process.exitcode}.", peer=rank)
        if error is not None:
            error.add_note(f"On rank {rank}:\n{trace}")
        return result if error is None else error

    def _stop(self) -> None:
        pipes, processes, self._pipes, self._processes = self._pipes, self._processes, [], []
        for pipe in pipes:
            pipe.close()  # which ends a rank that waits for a call
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()


def _serve(rank: int, world_size: int, variables: dict[str, str], store_file: str, timeout: float, pipe: Any) -> None:
    """A rank's process: carries out calls until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(variables)
    try:
        transport = ProcessGroupTransport.join(
            file_store(store_file, world_size), rank, world_size, kind="nccl", timeout=timeout
        )
    except BaseException as error:
        pipe.recv_bytes()
        pipe.send_bytes(pickle_error(error))
        return
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            message = pickle.dumps((fn(transport, *args), None, ""))
        except BaseException as error:
            transport.abort(error)
            message = pickle_error(error)
        pipe.send_bytes(message)
    transport.close()
