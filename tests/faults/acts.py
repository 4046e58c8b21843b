"""What the ranks of a scenario do: some healthy operations, then one rank, the culprit, does something else.

The others go on until an error stops them.
"""

import collections
import os
import random
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from culprits import FAULTS, MANY, Run, be_absent, raise_error
from operations import OPERATIONS, ring
from scenario import NUM_HEALTHY, Stage, play
from torch import Tensor

from murmura import InProcessTransport, MurmuraError, PeerLost
from murmura.transports import stalls
from murmura.transports.shared_memory import control_block

ANY_RANK = [(2, 0), (2, 1), (3, 1), (4, 0), (4, 3), (5, 2)]  # (world size, culprit), for the long grids


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


def disagree_on_a_channel(stage: Stage) -> None:
    """Ranks split off channels of different names, and go on with the world if nobody stops them."""
    stage.mark()
    stage.transport.channel("left" if stage.rank else "right").barrier(timeout=1.0)


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
    perform = ring(numel)(stage)
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


# Waiting


def wait_for_one(stage: Stage, culprit: int, stall_seconds: float | None) -> None:
    """All ranks but the culprit wait for it in an all-reduce, and warn after `stall_seconds`."""
    if stall_seconds is not None:
        stalls.WARN_SECONDS = stall_seconds
    run = Run(stage, "prepared")
    for _ in range(NUM_HEALTHY):
        run.all_reduce()
    if stage.rank == culprit:
        be_absent(run)
    else:
        run.all_reduce()


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


def fail_beside_an_operation(stage: Stage, num_channels: int) -> list[str]:
    """Rank 0 fails, again and again, while its communication thread waits for rank 1; the wrong errors it met."""
    sys.setswitchinterval(1e-6)
    control_block.FIRST_NAP = control_block.LONGEST_NAP = 1e-6
    wrong = []
    for number in range(num_channels):
        channel: Any = stage.transport.channel(f"side {number}")
        if stage.rank == 1:
            continue
        ticket = channel.all_reduce(torch.ones(8), async_op=True)
        while not channel._control.read(0, control_block.ASLEEP):
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
