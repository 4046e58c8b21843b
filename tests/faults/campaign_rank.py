"""What a rank of the fault campaign does: it trains until a fault ends it, and tells the judge how it ended."""

import collections
import contextlib
import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from campaign_backend import Backend, train_on_backend
from campaign_cases import BACKEND, COMPUTE_SECONDS, GLOO, HIERARCHICAL, IN_OPERATION, SHARED_MEMORY, Case
from torch import Tensor, nn
from traces import ports_of, segments_of

from murmura import (
    DDP,
    Algorithm,
    AlgorithmImpl,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    Checkpointer,
    Compressor,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    HierarchicalTransport,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    ProcessGroupTransport,
    PushSumAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    SharedMemoryTransport,
    StreamingDiLoCoAlgorithm,
    Transport,
)
from murmura.algorithms import algorithm_named
from murmura.transports.decorators.base import TransportDecorator
from murmura.transports.rendezvous import file_store

STORY = "the campaign broke it"  # the words of the exception that the culprit raises
STATUS = 7  # with which it exits
GIVE_UP_SECONDS = 12.0  # beyond the deadline: a survivor that has heard nothing by then ends all the same
LEAVE_SECONDS = 2.0  # for threads and descriptors of a transport that has been closed

_WEIGHTS = 64  # elements on a side of a layer


class Broken(RuntimeError):
    """What the culprit raises."""


@dataclass(frozen=True)
class Ending:
    """How a rank ended, as it says itself; times are of the one monotonic clock of the machine."""

    rank: int
    kind: str  # name of the exception's class; "" if the program came to its end
    message: str
    fields: dict[str, Any]  # rank, peer, operation: those that the exception has
    ended: float  # when the exception reached the user's program
    closed: float  # when the transport was closed
    segments: set[int]  # inodes of shared memory that it held
    ports: list[str]  # lines of the kernel's table that belonged to it
    left: list[str] = field(default_factory=list)  # what it still held after its transport was closed


class Trouble:
    """Commits the fault of a case, once, on the culprit."""

    def __init__(self, case: Case, rank: int, tell: Callable[..., None], released: threading.Event | None) -> None:
        self.case = case
        self.is_culprit = rank == case.culprit
        self.leaves_open = False
        self._armed = threading.Lock() if self.is_culprit else None
        self._rank = rank
        self._tell = tell
        self._released = released
        self._num_operations = itertools.count(1)

    def at(self, moment: str, count: int) -> None:
        """The program is at `moment` for the `count`-th time."""
        case = self.case
        is_due = self._armed is not None and moment == case.moment and count >= case.count
        if is_due and self._armed is not None and self._armed.acquire(blocking=False):
            self._tell("fault", at=time.monotonic())
            self._strike(case.fault)

    def operation(self) -> None:
        if self.is_culprit:
            self.at(self.case.moment, next(self._num_operations))

    def _strike(self, fault: str) -> None:
        if fault == "raise":
            raise Broken(f"{STORY} on rank {self._rank}")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "os._exit":
            os._exit(STATUS)
        if fault == "stop" and self._released is not None:
            self._released.wait()
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()
        elif fault.startswith("sys.exit"):
            self.leaves_open = fault.endswith("unclosed")
            sys.exit(STATUS)


class TroubledTransport(TransportDecorator):
    """Fails before an operation, in whichever thread that runs."""

    def __init__(self, transport: Transport, trouble: Trouble) -> None:
        super().__init__(transport)
        self._trouble = trouble

    def around(self, name: str, sent: Any, received: Any, work: Callable[[], Any]) -> Any:
        self._trouble.operation()
        return work()

    def wrap(self, split: Transport) -> "TroubledTransport":
        return TroubledTransport(split, self._trouble)


@dataclass(frozen=True)
class TroubledAlgorithm(Algorithm):
    """Fails when it is set up, or when a bucket is ready."""

    inner: Algorithm
    trouble: Trouble
    replaces: bool = False

    def reify(self, process_group: Transport) -> AlgorithmImpl:
        if self.replaces:
            self.trouble.at("set_algorithm, inside", 99)
        impl = self.inner.reify(process_group)
        work, numbers = impl.on_bucket_ready, itertools.count(1)

        def on_bucket_ready(bucket: Any) -> None:
            self.trouble.at("communication, bucket ready", next(numbers))
            work(bucket)

        impl.on_bucket_ready = on_bucket_ready  # type: ignore[method-assign]
        return impl


class Identity(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class Model(nn.Module):
    """Two layers, between which the culprit may fail."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WEIGHTS, _WEIGHTS), nn.Linear(_WEIGHTS, 1)
        self.trouble = trouble
        self.num_rounds = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_rounds = number = self.num_rounds + 1
        x = self.first(x)
        self.trouble.at("forward", number)
        return self.second(Identity.apply(x, lambda: self.trouble.at("backward", number)))  # type: ignore[no-any-return,no-untyped-call]


class Part:
    """Something with a state that a checkpoint holds."""

    def __init__(self, trouble: Trouble) -> None:
        self._trouble = trouble

    def state_dict(self) -> dict[str, int]:
        self._trouble.at("save, inside state_dict", 99)
        return {"state": 1}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is loaded")


class Nonzeros(Compressor):
    """Sends what is above the mean in magnitude, with its places: as many bytes as that takes."""

    gathers = is_uneven = True

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 16 * numel

    def encode(self, tensor: Tensor) -> Tensor:
        places = (tensor.abs() > tensor.abs().mean()).nonzero().view(-1)
        return torch.cat([places.double(), tensor[places].double()]).view(torch.uint8)

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        raise AssertionError("what is uneven is encoded")

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        places, values = payload.clone().view(torch.float64).chunk(2)
        out.zero_()[places.long()] = values.to(out.dtype)


def algorithm_of(name: str, hosts: Sequence[int] | None, optimizer: torch.optim.Optimizer) -> Algorithm:
    """The algorithm, set so that it communicates at least every second round."""
    is_even = hosts is None or len(set(collections.Counter(hosts).values())) == 1
    algorithms: dict[str, Callable[[], Algorithm]] = {
        "gradient_allreduce": GradientAllReduceAlgorithm,
        "bytegrad": ByteGradAlgorithm,
        "decentralized": DecentralizedAlgorithm,
        "shift_one": lambda: DecentralizedAlgorithm(peer_selection_mode="shift_one"),
        "low_precision_decentralized": lambda: LowPrecisionDecentralizedAlgorithm(hierarchical=is_even),
        "qadam": lambda: QAdamAlgorithm(optimizer),  # type: ignore[arg-type]
        "async": lambda: AsyncModelAverageAlgorithm(20),
        "local_sgd": lambda: LocalSGDAlgorithm(2),
        "diloco": lambda: DiLoCoAlgorithm(2),
        "powersgd": PowerSGDAlgorithm,
        "push_sum": PushSumAlgorithm,
        "streaming_diloco": lambda: StreamingDiLoCoAlgorithm(2, fragments=2),  # one of them is always under way
        "sparse_loco": lambda: algorithm_named("sparse_loco:interval=2"),
        "uneven_payloads": lambda: GradientAllReduceAlgorithm(compressor=ErrorFeedback(Nonzeros())),
        "averaged_moments": lambda: LocalSGDAlgorithm(2, average_moments=True),
    }
    return algorithms[name]()


def train(case: Case, transport: Transport, trouble: Trouble, folder: str, tell: Callable[..., None]) -> None:
    """The user's program: every call that the campaign has a moment for."""
    torch.manual_seed(0)
    model = Model(trouble)
    optimizer: torch.optim.Optimizer
    if case.algorithm == "qadam":
        optimizer = QAdamOptimizer(model.parameters(), warmup_steps=2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = itertools.count(1)
    optimizer.register_step_pre_hook(lambda *_: trouble.at("step", next(steps)))
    trouble.at("constructor, before", 99)
    chosen = TroubledAlgorithm(algorithm_of(case.algorithm, case.hosts, optimizer), trouble)
    ddp = DDP(model, transport, algorithm=chosen)
    checkpointer = Checkpointer(os.path.join(folder, "checkpoints")) if case.moment.startswith("save") else None
    give_up = time.monotonic() + case.timeout + GIVE_UP_SECONDS
    batches = _batches(trouble, transport.rank)
    for number, batch in enumerate(ddp.join(batches) if case.moment.startswith("join") else batches, start=1):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        if transport.rank == case.late and case.is_late and number in (1, case.count):
            time.sleep(COMPUTE_SECONDS)
        if number == case.count:
            tell("training")
            if checkpointer is not None:
                trouble.at("save, before", number)
                checkpointer.save(number, ddp=ddp, optimizer=optimizer, part=Part(trouble))
            if case.moment.startswith("set_algorithm"):
                trouble.at("set_algorithm, before", number)
                other = algorithm_of(case.other_algorithm, case.hosts, optimizer)
                ddp.set_algorithm(TroubledAlgorithm(other, trouble, replaces=True))
            if case.moment.startswith(("close", "end")):
                break
        if time.monotonic() > give_up:
            return
    trouble.at("close, before", 99)
    ddp.close()
    trouble.at("close, after", 99)
    transport.barrier()
    trouble.at("end", 99)


def _batches(trouble: Trouble, rank: int) -> Iterator[Tensor]:
    data = torch.Generator().manual_seed(rank)
    for number in itertools.count(1):
        trouble.at("join, next batch", number)
        yield torch.randn(4, _WEIGHTS, generator=data)


# The rank


def live(
    pipe: Connection, case: Case, rank: int, folder: str, own: Transport | None, released: threading.Event | None
) -> None:
    """The life of a rank: a thread that was given its `own` transport, or a process that joins.

    A rank that run_world started leaves it to run_world to close the transport, and raises how it ended.
    """
    torch.set_num_threads(1)
    speaking = threading.Lock()

    def tell(word: str, **facts: Any) -> None:
        with speaking, contextlib.suppress(OSError):  # the judge may have left
            pipe.send((word, facts))

    is_process = own is None
    if is_process:
        gc.freeze()  # what was imported is no garbage: looking through it would take most of a short case
    before = holdings() if is_process else {}
    trouble = Trouble(case, rank, tell, released)
    times = {"ended": 0.0}
    segments: set[int] = set()
    ports: list[str] = []
    kind, message, fields = "", "", {}
    failure: BaseException | None = None
    curtain = contextlib.ExitStack()
    try:
        with curtain:
            try:
                joined = join(case, rank, folder) if own is None else own
                transport = joined
                if case.moment in IN_OPERATION and isinstance(joined, Transport):
                    transport = TroubledTransport(joined, trouble)
                if not case.in_world:
                    curtain.enter_context(transport)
                if isinstance(transport, Backend):
                    train_on_backend(case, Model(trouble), trouble, tell)
                else:
                    train(case, transport, trouble, folder, tell)
            finally:
                times["ended"] = time.monotonic()
                if is_process:
                    segments, ports = segments_of(), ports_of()
                if trouble.leaves_open:
                    curtain.pop_all()
    except BaseException as error:
        kind, message = type(error).__qualname__, str(error)  # as a traceback shows it
        fields = {name: getattr(error, name) for name in ("rank", "peer", "operation") if hasattr(error, name)}
        failure = error if case.in_world else None  # in a process its frames would hold what they used
    closed = time.monotonic()
    transport = joined = None  # type: ignore[assignment]
    left = [] if trouble.leaves_open or not is_process else remains(before)
    tell("ending", ending=Ending(rank, kind, message, fields, times["ended"], closed, segments, ports, left))
    pipe.close()
    if failure is not None:
        raise failure
    if is_process and kind == "SystemExit":
        sys.exit(STATUS)


def join(case: Case, rank: int, folder: str) -> Transport | Backend:
    size, hosts, timeout = case.world_size, case.hosts, case.timeout
    if case.transport == BACKEND:
        return Backend(case, rank, os.path.join(folder, "store"))
    if case.transport == SHARED_MEMORY:
        return SharedMemoryTransport.join(Path(folder).name, rank, size, hosts=hosts, timeout=timeout)
    store = file_store(os.path.join(folder, "store"), size)
    if case.transport == HIERARCHICAL:
        return HierarchicalTransport.join(store, rank, size, hosts=hosts, timeout=timeout)
    assert case.transport == GLOO
    return ProcessGroupTransport.join(store, rank, size, hosts=hosts, timeout=timeout)


# What is left


def holdings() -> dict[Any, str]:
    """What this process holds that a transport could have opened, in words, by what identifies it."""
    found: dict[Any, str] = {
        thread.ident: f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith("murmura")
    }
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("socket:", "anon_inode:", "/memfd:", "/dev/shm/")):
                found[name, target] = f"descriptor of {target}"
    for inode in segments_of():
        found["segment", inode] = f"mapping of memfd {inode}"
    return found


def remains(before: dict[Any, str]) -> list[str]:
    """What is held now, was not held `before`, and is still held after a moment."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while left := [words for key, words in holdings().items() if key not in before]:
        if time.monotonic() > deadline:
            break
        gc.collect()  # a mapping lives as long as the last tensor in it
        time.sleep(0.01)
    return left
