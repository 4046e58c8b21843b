"""An all-reduce of a small tensor, prepared once for each tensor so that a call is a dozen bytecodes.

Every rank copies its input into its slot, enters, and sums all slots in rank order: one synchronisation. Two slots
by parity suffice: a rank enters the collective after next only when all have entered the next, and so have left this.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmura.collectives.reduction import HALVES, Reduction
from murmura.transports.shared_memory import futex
from murmura.transports.shared_memory.board import ASLEEP, DIGEST, ENTERED, YIELDS, Board, digest_of, slot_bytes
from murmura.types import ReduceOp


def can_prepare(tensor: Tensor, world_size: int) -> bool:
    """Whether `OneShot` takes `tensor`: contiguous, on the CPU, small, and of a real dtype that numpy has."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and 0 < tensor.nbytes <= slot_bytes(world_size)
        and tensor.dtype not in HALVES
        and not tensor.is_complex()
        and not tensor.is_neg()
    )


class Outcome(Enum):
    """How far a prepared call came on its own."""

    DONE = auto()
    ALONE = auto()  # a peer has not entered yet: sleep until all have, then `finish`
    DISAGREED = auto()


class OneShot:
    """The prepared all-reduce of whatever tensor of this shape and dtype lies at this address.

    It holds no reference to the tensor: it is looked up by address, shape and dtype of a tensor that is alive.
    `fire(number)` runs collective `number`; `finish(number)` its last part, once all have entered.
    """

    def __init__(self, board: Board, tensor: Tensor, op: ReduceOp, call: str) -> None:
        self.call = call
        self.fire, self.finish = _prepare(board, tensor, op, digest_of(call))


def _prepare(
    board: Board, tensor: Tensor, op: ReduceOp, digest: int
) -> tuple[Callable[[int], Outcome], Callable[[int], Outcome]]:
    # Everything is a local variable of the two closures: attribute look-ups and method calls would double the time.
    num_bytes, dtype = tensor.nbytes, tensor.detach().numpy().dtype
    raw: Any = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(tensor.data_ptr()))
    source, result = memoryview(raw), raw.view(dtype)
    segment = board.segment
    slots = [segment.memory[board.slots[parity][board.rank] :][:num_bytes] for parity in (0, 1)]
    inputs: list[list[Any]] = [
        [segment.bytes[place : place + num_bytes].view(dtype) for place in board.slots[parity]] for parity in (0, 1)
    ]
    reduction = Reduction(op, tensor.dtype, board.world_size, torch.device("cpu"))
    words, own, own_digest = board.words, board.own + ENTERED, board.own + DIGEST
    entered = [board.at[peer] + ENTERED for peer in board.peers]
    their_digest = DIGEST - ENTERED
    asleep = [board.at[peer] + ASLEEP for peer in board.peers]
    spins, yields, sched_yield = range(board.spins), range(YIELDS), os.sched_yield
    fence, wake_sleepers = board.fence, board.wake_sleepers
    release, acquire = fence.release, fence.acquire
    ordered = futex.ORDERED_STORES
    done, alone, disagreed = Outcome.DONE, Outcome.ALONE, Outcome.DISAGREED
    reduce = reduction.bound_reduce(inputs[0], inputs[1], result)

    def fire(number: int) -> Outcome:
        parity = number & 1
        slots[parity][:] = source
        words[own_digest + parity] = digest
        if not ordered:
            fence()
        words[own] = number
        release()
        acquire()
        for at in asleep:
            if words[at]:
                wake_sleepers()
                break
        for at in entered:
            if words[at] < number:  # a peer is late
                for _ in spins:
                    if words[at] >= number:
                        break
                else:
                    for _ in yields:
                        sched_yield()
                        if words[at] >= number:
                            break
                    else:
                        return alone
        return finish(number)

    def finish(number: int) -> Outcome:
        parity = number & 1
        if not ordered:
            fence()
        for at in entered:
            if words[at + their_digest + parity] != digest:
                return disagreed
        reduce(parity)
        return done

    return fire, finish
