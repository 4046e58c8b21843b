"""What the ranks of a scenario do: some healthy operations, then one rank, the culprit, does something else.

The others go on until an error stops them. Every result of a healthy operation is checked, to the bit.
"""

import collections
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from scenario import NUM_HEALTHY, Stage, play
from torch import Tensor

from murmura import InProcessTransport, MurmuraError, PeerLost
from murmura.transports import failures
from murmura.transports.shared_memory import board, one_shot

SMALL, LARGE = 1024, 2**20  # elements of float32: 4 KiB and 4 MiB
PAYLOADS = ("prepared", "allocated", "staged")
ANY_RANK = [(2, 0), (2, 1), (3, 1), (4, 0), (4, 3), (5, 2)]  # (world size, culprit), for the long grids
LOST_SECONDS = 5.0  # an operation that lasts so long on a busy machine missed its wake-up
MANY = 1_000_000  # operations: more than any scenario lasts


class Speechless(Exception):
    """An error that cannot say what happened."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Run:
    """A run of all-reduces of one tensor, which takes the path that `payload` names."""

    def __init__(self, stage: Stage, payload: str) -> None:
        self.stage = stage
        self.transport = stage.transport
        self.numel = SMALL if payload == "prepared" else LARGE
        # A tensor of our own is staged if it is large; one from allocate is reduced where it lies.
        mixed = payload == "mixed" and stage.rank % 2 == 0
        own = payload in ("prepared", "staged") or mixed
        self.tensor = torch.zeros(self.numel) if own else stage.transport.allocate(self.numel)
        n = stage.world_size
        self.expected = torch.full((self.numel,), float(n * (n + 1) // 2))

    def all_reduce(self) -> None:
        self.tensor.fill_(self.stage.rank + 1)
        self.stage.mark()
        self.transport.all_reduce(self.tensor)
        assert torch.equal(self.tensor, self.expected), "a healthy all-reduce gave a wrong sum"

    def go_on(self) -> None:
        for _ in range(MANY):
            self.all_reduce()


def reduce_until(stage: Stage, payload: str, fault: str, culprit: int) -> None:
    """All-reduces; after a few healthy ones the culprit commits its `fault`."""
    run = Run(stage, payload)
    for _ in range(NUM_HEALTHY):
        run.all_reduce()
    if stage.rank == culprit:
        stage.tell("fault", at=time.monotonic())
        stage.mark()
        FAULTS[fault](run)
    else:
        stage.tell("ready")
        run.go_on()


# Faults: what the culprit does instead of the next all-reduce


def be_absent(run: Run) -> None:
    """Do something else for ever, until it is killed or the scenario ends."""
    run.stage.hear()


def go_on(run: Run) -> None:
    """Nothing of its own: the fault comes from outside, at whatever moment."""
    run.go_on()


def raise_error(run: Run) -> None:
    raise ValueError("the loader broke")


def raise_long_story(run: Run) -> None:
    raise ValueError("the loader broke: " + "ĝŝ" * 100_000)


def raise_without_words(run: Run) -> None:
    raise Speechless


def return_early(run: Run) -> None:
    return


def close_and_stay(run: Run) -> None:
    """Leave the world, while the process goes on."""
    run.stage.curtain.close()
    run.stage.hear()


def fail_and_stay(run: Run) -> None:
    """Fail in the world, while the process catches it and goes on."""
    try:
        with run.transport:
            raise_error(run)
    except ValueError:
        run.stage.hear()


def sys_exit(run: Run) -> None:
    sys.exit(7)


def sys_exit_unclosed(run: Run) -> None:
    run.stage.leave_open()
    sys.exit(7)


def os_exit(run: Run) -> None:
    os._exit(7)


def call_barrier(run: Run) -> None:
    run.transport.barrier()


def call_broadcast(run: Run) -> None:
    run.transport.broadcast(run.tensor)


def call_recv(run: Run) -> None:
    run.transport.recv(run.tensor, (run.stage.rank + 1) % run.stage.world_size)


def call_send(run: Run) -> None:
    run.transport.send(run.tensor, (run.stage.rank + 1) % run.stage.world_size)


def call_exchange(run: Run) -> None:
    peers = [rank for rank in range(run.stage.world_size) if rank != run.stage.rank]
    run.transport.exchange(
        [(run.tensor, peer) for peer in peers], [(torch.zeros_like(run.tensor), peer) for peer in peers]
    )


def call_all_gather(run: Run) -> None:
    run.transport.all_gather(run.tensor)


def pass_other_length(run: Run) -> None:
    run.transport.all_reduce(torch.ones(run.numel + 1))


def pass_other_dtype(run: Run) -> None:
    run.transport.all_reduce(torch.ones(run.numel, dtype=torch.int32))


def pass_other_op(run: Run) -> None:
    run.transport.all_reduce(run.tensor, "max")


def pass_other_shape(run: Run) -> None:
    run.transport.all_reduce(run.tensor.view(2, -1))


FAULTS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (
        be_absent, go_on, raise_error, raise_long_story, raise_without_words, return_early, close_and_stay,
        fail_and_stay, sys_exit, sys_exit_unclosed, os_exit, call_barrier, call_broadcast, call_all_gather,
        call_recv, call_send, call_exchange, pass_other_length, pass_other_dtype, pass_other_op, pass_other_shape,
    )
}  # fmt: skip


# Other operations


def operate_until(stage: Stage, operation: str, fault: str, culprit: int) -> None:
    """As `reduce_until`, with another operation than an inline all-reduce of the whole world."""
    perform = OPERATIONS[operation](stage)
    for _ in range(NUM_HEALTHY):
        stage.mark()
        perform()
    if stage.rank != culprit:
        stage.tell("ready")
        for _ in range(MANY):
            stage.mark()
            perform()
    stage.tell("fault", at=time.monotonic())
    if fault == "go_on":
        for _ in range(MANY):
            stage.mark()
            perform()
    FAULTS[fault](Run(stage, "prepared"))


def _barrier(stage: Stage) -> Callable[[], None]:
    return stage.transport.barrier


def _broadcast(numel: int, src: int, allocated: bool = False) -> Callable[[Stage], Callable[[], None]]:
    def prepare(stage: Stage) -> Callable[[], None]:
        tensor = stage.transport.allocate(numel) if allocated else torch.zeros(numel)
        expected = torch.full((numel,), float(src))

        def perform() -> None:
            tensor.fill_(stage.rank)
            stage.transport.broadcast(tensor, src)
            assert torch.equal(tensor, expected)

        return perform

    return prepare


def _async_all_reduce(numel: int) -> Callable[[Stage], Callable[[], None]]:
    def prepare(stage: Stage) -> Callable[[], None]:
        n = stage.world_size
        tensors = [torch.zeros(numel) for _ in range(3)]

        def perform() -> None:
            for tensor in tensors:
                tensor.fill_(stage.rank + 1)
            tickets: list[Any] = [stage.transport.all_reduce(tensor, async_op=True) for tensor in tensors]
            errors: list[Exception] = []
            for ticket in tickets:
                try:
                    result = ticket.wait()
                except Exception as error:
                    errors.append(error)
                else:
                    assert not errors, "an operation succeeded after one before it had failed"
                    assert torch.equal(result, torch.full((numel,), float(n * (n + 1) // 2)))
            if errors:
                assert {type(error) for error in errors} == {type(errors[0])}
                assert all(ticket.done() for ticket in tickets)
                raise errors[0]

        return perform

    return prepare


def _ring(numel: int) -> Callable[[Stage], Callable[[], None]]:
    """Every rank sends to the next and receives from the one before, in one exchange."""

    def prepare(stage: Stage) -> Callable[[], None]:
        n, rank = stage.world_size, stage.rank
        outgoing, incoming = torch.full((numel,), float(rank)), torch.zeros(numel)

        def perform() -> None:
            stage.transport.exchange([(outgoing, (rank + 1) % n)], [(incoming, (rank - 1) % n)])
            assert torch.equal(incoming, torch.full((numel,), float((rank - 1) % n)))

        return perform

    return prepare


def _star(numel: int, sends: bool) -> Callable[[Stage], Callable[[], None]]:
    """Rank 0 sends to every other rank in turn, or receives from it."""

    def prepare(stage: Stage) -> Callable[[], None]:
        tensor = torch.zeros(numel)

        def perform() -> None:
            for peer in range(1, stage.world_size):
                if stage.rank == 0:
                    stage.mark()
                    (stage.transport.send if sends else stage.transport.recv)(tensor, peer)
                elif stage.rank == peer:
                    (stage.transport.recv if sends else stage.transport.send)(tensor, 0)

        return perform

    return prepare


def _reduce(stage: Stage) -> Callable[[], None]:
    tensor, n = torch.zeros(SMALL), stage.world_size

    def perform() -> None:
        stage.transport.reduce(tensor.fill_(stage.rank + 1), 1)
        assert stage.rank != 1 or torch.equal(tensor, torch.full((SMALL,), float(n * (n + 1) // 2)))

    return perform


def _reduce_scatter(stage: Stage) -> Callable[[], None]:
    tensor, n = torch.zeros(SMALL), stage.world_size

    def perform() -> None:
        chunk = stage.transport.reduce_scatter(tensor.fill_(stage.rank + 1))
        assert torch.equal(chunk, torch.full_like(chunk, float(n * (n + 1) // 2)))

    return perform


def _all_gather(stage: Stage) -> Callable[[], None]:
    tensor = torch.full((SMALL + stage.rank,), float(stage.rank))

    def perform() -> None:
        for rank, each in enumerate(stage.transport.all_gather(tensor)):
            assert torch.equal(each, torch.full((SMALL + rank,), float(rank)))

    return perform


def _gather(stage: Stage) -> Callable[[], None]:
    tensor = torch.full((SMALL,), float(stage.rank))

    def perform() -> None:
        gathered = stage.transport.gather(tensor, 1)
        assert gathered is None or [float(each[-1]) for each in gathered] == list(range(stage.world_size))

    return perform


def _scatter(stage: Stage) -> Callable[[], None]:
    tensors = [torch.full((SMALL,), float(rank)) for rank in range(stage.world_size)]
    out = torch.zeros(SMALL)

    def perform() -> None:
        stage.transport.scatter(tensors if stage.rank == 1 else None, 1, out=out)
        assert torch.equal(out, tensors[stage.rank])

    return perform


def _all_to_all(stage: Stage) -> Callable[[], None]:
    n, rank = stage.world_size, stage.rank
    sends = [torch.full((SMALL + rank * peer,), float(10 * rank + peer)) for peer in range(n)]
    recvs = [torch.zeros(SMALL + rank * peer) for peer in range(n)]

    def perform() -> None:
        stage.transport.all_to_all(sends, recvs)
        assert [float(each[-1]) for each in recvs] == [10 * peer + rank for peer in range(n)]

    return perform


OPERATIONS: dict[str, Callable[[Stage], Callable[[], None]]] = {
    "barrier": _barrier,
    "small broadcast": _broadcast(SMALL, 0),
    "small broadcast from rank 1": _broadcast(SMALL, 1),
    "staged broadcast": _broadcast(LARGE, 0),
    "staged broadcast from rank 1": _broadcast(LARGE, 1),
    "allocated broadcast": _broadcast(LARGE, 0, allocated=True),
    "small async all_reduce": _async_all_reduce(SMALL),
    "large async all_reduce": _async_all_reduce(LARGE),
    "small ring": _ring(SMALL),
    "large ring": _ring(5 * LARGE),  # more than a pair's staging area holds, so that senders wait in the middle
    "sends": _star(SMALL, sends=True),
    "large sends": _star(5 * LARGE, sends=True),
    "recvs": _star(SMALL, sends=False),
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}


# Parts of a world


def leave_before_channel(stage: Stage, culprit: int) -> None:
    """The culprit fails before it comes to the channel on which the others wait for it."""
    run = Run(stage, "prepared")
    for _ in range(NUM_HEALTHY):
        run.all_reduce()
    if stage.rank == culprit:
        raise_error(run)
    stage.mark()
    stage.transport = stage.transport.channel("side")
    stage.mark()
    stage.transport.all_reduce(torch.ones(8))


def reduce_on_channel(stage: Stage, fault: str, culprit: int) -> None:
    """All-reduces on a channel of all ranks; the world's own order is not used."""
    stage.transport = stage.transport.channel("side")
    reduce_until(stage, "prepared", fault, culprit)


def reduce_in_subgroup(stage: Stage, members: tuple[int, ...], fault: str, culprit: int) -> Any:
    """All-reduces in a subgroup; the ranks outside it wait for the director and then use the world."""
    subgroup = stage.transport.split("part", members)
    if subgroup is None:
        stage.tell("ready")
        return stage.hear()
    stage.transport = subgroup
    return reduce_until(stage, "prepared", fault, members.index(culprit))


# Messages that do not fit


def exchange_misfits(stage: Stage, how: str, numel: int) -> None:
    """Two ranks exchange healthy messages, then rank 1 sends or expects another kind than rank 0 does."""
    transport, other = stage.transport, 1 - stage.rank
    tensor = torch.full((numel,), float(stage.rank))
    incoming = torch.zeros(numel)
    for _ in range(NUM_HEALTHY):
        stage.mark()
        transport.exchange([(tensor, other)], [(incoming, other)])
        assert torch.equal(incoming, torch.full((numel,), float(other)))
    misfit = {
        "length": torch.zeros(numel + 1),
        "dtype": torch.zeros(numel, dtype=torch.int32),
        "shape": torch.zeros(2, numel // 2),
    }[how.split()[0]]
    stage.mark()
    if how.endswith("sent"):
        if stage.rank == 0:
            transport.recv(tensor, 1)
        else:
            transport.send(misfit, 0)
    elif stage.rank == 0:
        transport.send(tensor, 1)
    else:
        transport.recv(misfit, 0)


def collective_against_message(stage: Stage, message: str, numel: int, culprit: int) -> None:
    """Healthy exchanges in a ring; then the culprit enters a collective while the others send or receive."""
    perform = _ring(numel)(stage)
    for _ in range(NUM_HEALTHY):
        stage.mark()
        perform()
    stage.mark()
    if stage.rank == culprit:
        stage.transport.all_reduce(torch.ones(numel))
        return
    tensor: Tensor = torch.ones(numel)
    if message == "recv":
        stage.transport.recv(tensor, culprit)
    elif message == "send":
        stage.transport.send(tensor, culprit)
    else:
        stage.transport.exchange([(tensor, culprit)], [(torch.zeros(numel), culprit)])


def fail_beside_an_operation(stage: Stage, num_channels: int) -> list[str]:
    """Rank 0 fails, again and again, while its communication thread waits for rank 1; the wrong errors it met."""
    sys.setswitchinterval(1e-6)
    board.FIRST_NAP = board.LONGEST_NAP = 1e-6
    wrong = []
    for number in range(num_channels):
        channel: Any = stage.transport.channel(f"side {number}")
        if stage.rank == 1:
            continue
        ticket = channel.all_reduce(torch.ones(8), async_op=True)
        while not channel._board.read(0, board.ASLEEP):
            assert not ticket.done()
        try:
            with channel:
                raise_error(Run(stage, "prepared"))
        except ValueError:
            pass
        try:
            ticket.wait()
        except MurmuraError:
            pass
        except Exception as error:
            wrong.append(repr(error))
    return wrong


def disagree_on_a_channel(stage: Stage) -> None:
    """Ranks split off channels of different names, and go on with the world if nobody stops them."""
    stage.mark()
    stage.transport.channel("left" if stage.rank else "right").barrier(timeout=1.0)


# Waiting


def be_interrupted(stage: Stage, operation: str, culprit: int) -> None:
    """The culprit waits for the others, who never come, until it is interrupted; then they wait for it."""
    perform = OPERATIONS[operation](stage)
    perform()
    if stage.rank == culprit:
        # An interrupted Ticket.wait leaves its operation under way: only the end of the program ends that.
        stage.tries_again = "async" not in operation
        stage.tell("ready")
        stage.mark()
        perform()
    stage.hear()
    # Whoever was interrupted may have done its part of this one: it is the next at the latest that fails.
    for _ in range(2):
        stage.mark()
        perform()


def be_interrupted_at_random(stage: Stage, num_channels: int) -> dict[str, int]:
    """Rank 0 is interrupted at any moment of a run of all-reduces, on one channel after the other; what it met."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    chance = random.Random(0)
    seen: collections.Counter[str] = collections.Counter()
    tensor = torch.zeros(8)
    for number in range(num_channels):
        channel = stage.transport.channel(f"side {number}")
        for _ in range(2):
            channel.all_reduce(tensor)
        try:
            if stage.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(50e-6, 400e-6))
            for _ in range(MANY):
                channel.all_reduce(tensor)
        except KeyboardInterrupt:
            seen["KeyboardInterrupt"] += 1
        except MurmuraError:
            assert stage.rank == 1, "nothing was wrong with the other rank"
        except Exception as error:
            seen[f"{error!r} during {error.__context__!r}"] += 1
        if stage.rank == 0:
            # Whatever was interrupted, the next call raises or ends at its deadline.
            signal.setitimer(signal.ITIMER_REAL, 2.0)
            try:
                channel.barrier(timeout=0.001)
            except MurmuraError:
                pass
            except KeyboardInterrupt:
                seen["the next call hung"] += 1
                os._exit(1)  # nothing can be said about a rank that hangs
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            channel.abort(ValueError("the end of this channel"))
            channel.close()
    return dict(seen)


def be_interrupted_beside_a_thread(pipe: Connection) -> None:
    """As `be_interrupted`, with threads: rank 0 is the main thread, the only one that can be interrupted."""
    main, other = InProcessTransport.create_group(2, timeout=20.0)
    interrupted = threading.Event()
    lost: list[PeerLost] = []

    def live() -> None:
        other.barrier()
        interrupted.wait(20.0)
        try:
            for _ in range(2):
                other.barrier()
        except PeerLost as error:
            lost.append(error)

    thread = threading.Thread(target=live)
    thread.start()

    def tell_end(stage: Stage) -> None:
        try:
            be_interrupted(stage, "barrier", 0)
        finally:
            interrupted.set()
            thread.join(20.0)
            stage.tell("lost", messages=[str(error) for error in lost])

    play(pipe, main, tell_end, ())


def wait_for_one(stage: Stage, culprit: int, stall_seconds: float | None) -> None:
    """All ranks but the culprit wait for it in an all-reduce, and warn after `stall_seconds`."""
    if stall_seconds is not None:
        failures.STALL_SECONDS = stall_seconds
    run = Run(stage, "prepared")
    for _ in range(NUM_HEALTHY):
        run.all_reduce()
    if stage.rank == culprit:
        be_absent(run)
    else:
        run.all_reduce()


def wait_while_one_computes(stage: Stage, operation: str, seconds: float) -> tuple[float, float]:
    """Rank 0 computes while the others wait; the processor and the wall time that each rank's part took."""
    perform = OPERATIONS[operation](stage)
    for _ in range(NUM_HEALTHY):
        perform()
    clock = time.process_time if threading.current_thread() is threading.main_thread() else time.thread_time
    began, used = time.monotonic(), clock()
    if stage.rank == 0:
        while time.monotonic() < began + seconds:
            pass
    perform()
    return clock() - used, time.monotonic() - began


def reduce_with_skew(stage: Stage, num_operations: int, patient: bool) -> None:
    """Small all-reduces, each rank late by a random time of its own. Without `patient` a rank sleeps before it looks.

    Nobody looks again by himself, so a wake-up that is lost shows as a long operation.
    """
    board.FIRST_NAP = board.LONGEST_NAP = 2 * LOST_SECONDS
    if not patient:
        board.SPINS = board.YIELDS = one_shot.YIELDS = 0
    n, rank, transport = stage.world_size, stage.rank, stage.transport
    if not patient:
        transport._board.spins = 0
    chance = random.Random(rank)
    bases = [torch.arange(numel, dtype=torch.int64) for numel in (1, 33, 1024)]
    tensors = [torch.empty_like(base) for base in bases]
    for number in range(num_operations):
        # Mostly about as late as an operation lasts, at times much later, so that the others sleep.
        for _ in range(chance.randrange(2000) if chance.random() < 0.02 else chance.randrange(50)):
            pass
        which = number % 3
        tensor, base = tensors[which], bases[which]
        torch.add(base, 1000 * rank + number, out=tensor)
        began = time.monotonic()
        transport.all_reduce(tensor)
        assert time.monotonic() - began < LOST_SECONDS, f"rank {rank} slept on in all-reduce {number}"
        expected = base * n + (1000 * (n * (n - 1) // 2) + n * number)
        if not torch.equal(tensor, expected):
            raise AssertionError(f"all-reduce {number} gave {tensor[:4].tolist()}…, not {expected[:4].tolist()}…")


def mix_with_skew(stage: Stage, num_rounds: int) -> None:
    """All-reduces on every path, broadcasts, messages and barriers, in a random order that the ranks share.

    Each rank is late as it happens, and nobody looks again by himself, as in `reduce_with_skew`.
    """
    board.FIRST_NAP = board.LONGEST_NAP = 2 * LOST_SECONDS
    n, rank, transport = stage.world_size, stage.rank, stage.transport
    order, skew = random.Random(n), random.Random(rank)
    sizes = (1, 1000, 70_001, 300_003)  # below and above what is small for two to five ranks
    owned = {numel: torch.zeros(numel) for numel in sizes}
    shared = {numel: transport.allocate(numel) for numel in sizes}
    for number in range(num_rounds):
        for _ in range(skew.randrange(20_000) if skew.random() < 0.1 else skew.randrange(200)):
            pass
        numel = order.choice(sizes)
        where = order.choice(("owned", "shared", "either"))
        tensor = (owned if where == "owned" or (where == "either" and rank % 2) else shared)[numel]
        tensor.fill_(float(rank + number))
        what = order.choice(("all_reduce", "all_reduce", "broadcast", "ring", "barrier"))
        src = order.randrange(n)
        expected, result = float(rank + number), tensor
        began = time.monotonic()
        if what == "all_reduce":
            transport.all_reduce(tensor)
            expected = float(n * number + n * (n - 1) // 2)
        elif what == "broadcast":
            transport.broadcast(tensor, src)
            expected = float(src + number)
        elif what == "ring":
            result = torch.empty(numel)
            transport.exchange([(tensor, (rank + 1) % n)], [(result, (rank - 1) % n)])
            expected = float((rank - 1) % n + number)
        else:
            transport.barrier()
        assert time.monotonic() - began < LOST_SECONDS, f"rank {rank} slept on in {what}, round {number}"
        if not torch.equal(result, torch.full((numel,), expected)):
            raise AssertionError(f"{what} of {numel} elements, round {number}: not {expected}")
