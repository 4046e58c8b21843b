"""Ranks that come late: those that wait must sleep, be woken every time, and find every word in its place."""

import os
import random
import threading
import time

import torch
from operations import OPERATIONS
from scenario import NUM_HEALTHY, Stage

from murmura.transports.shared_memory import control_block, small_all_reduce

LOST_SECONDS = 5.0  # an operation that lasts so long on a busy machine missed its wake-up


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
    control_block.FIRST_NAP = control_block.LONGEST_NAP = 2 * LOST_SECONDS
    if not patient:
        control_block.SPINS = control_block.YIELDS = small_all_reduce.YIELDS = 0
    n, rank, transport = stage.world_size, stage.rank, stage.transport
    if not patient:
        transport._control.spins = 0
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
    control_block.FIRST_NAP = control_block.LONGEST_NAP = 2 * LOST_SECONDS
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


def wait_on_a_busy_machine(stage: Stage, numel: int) -> None:
    """Rank 1 does not come; where many want the processor, a yield takes as long as all of these together."""
    if stage.rank == 1:
        stage.hear()
        return
    os.sched_yield = lambda: time.sleep(0.05)
    stage.mark()
    stage.transport.all_reduce(torch.ones(numel), timeout=0.1)
