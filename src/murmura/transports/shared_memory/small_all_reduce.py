"""An all-reduce of small tensors, prepared once so that a call is a few dozen bytecodes and no torch operation.

Every rank copies its input into its slot, enters, and sums all slots in rank order: one synchronisation. Two slots
by parity suffice: a rank enters the collective after next only when all have entered the next, and so have left this.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np
from torch import Tensor

from murmura.collectives.reduction import HALVES, Reduction
from murmura.transports.shared_memory import futex
from murmura.transports.shared_memory.control_block import (
    ASLEEP,
    DIGEST,
    ENTERED,
    YIELD_SECONDS,
    YIELDS,
    ControlBlock,
    digest_of,
    slot_bytes,
)
from murmura.types import ReduceOp


def can_prepare(tensor: Tensor, world_size: int) -> bool:
    """Whether `SmallAllReduce` takes `tensor`: contiguous, on the CPU, small, and of a real dtype that numpy has."""
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


class SmallAllReduce:
    """The prepared all-reduce of tensors of one shape and dtype.

    `run(number, source, result)` runs collective `number` on a tensor: `source` its bytes, `result` its numpy view, as
    `views` makes them. `finish(number, result)` is the last part, for when a peer came late.
    """

    def __init__(self, control: ControlBlock, tensor: Tensor, op: ReduceOp, call: str) -> None:
        self.call = call
        self._num_bytes, self._dtype = tensor.nbytes, tensor.detach().numpy().dtype
        self._bytes_type = ctypes.c_uint8 * self._num_bytes
        self.run, self.finish = self._prepare(control, Reduction(op, tensor.dtype, control.world_size, tensor.device))

    def views(self, address: int) -> tuple[memoryview, Any]:
        """Views of the memory of a tensor at `address`, without a reference to it.

        They are looked up by address, shape and dtype of a tensor that is alive, so they never outlive the memory.
        """
        raw = memoryview(self._bytes_type.from_address(address)).cast("B")
        return raw, np.frombuffer(raw, self._dtype)

    def _prepare(
        self, control: ControlBlock, reduction: Reduction
    ) -> tuple[Callable[..., Outcome], Callable[..., Outcome]]:
        # Everything is a local variable of the two closures: attribute look-ups and method calls would double the time.
        num_bytes, segment, places = self._num_bytes, control.segment, control.slots
        slots = [segment.memory[places[parity][control.rank] :][:num_bytes] for parity in (0, 1)]
        inputs: list[list[Any]] = [
            [segment.bytes[place : place + num_bytes].view(self._dtype) for place in places[parity]]
            for parity in (0, 1)
        ]
        reduce = reduction.bound_reduce(*inputs)
        words, own, own_digest, digest = (
            control.words,
            control.own + ENTERED,
            control.own + DIGEST,
            digest_of(self.call),
        )
        entered = [control.at[peer] + ENTERED for peer in control.peers]
        asleep = [control.at[peer] + ASLEEP for peer in control.peers]
        their_digest = DIGEST - ENTERED
        spins, yields, sched_yield = range(control.spins), range(YIELDS), os.sched_yield
        monotonic = time.monotonic
        fence, wake_sleepers = control.fence, control.wake_sleepers
        release, acquire = fence.release, fence.acquire
        ordered = futex.ORDERED_STORES
        done, alone, disagreed = Outcome.DONE, Outcome.ALONE, Outcome.DISAGREED

        def run(number: int, source: memoryview, result: Any) -> Outcome:
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
                        give_up = monotonic() + YIELD_SECONDS
                        for _ in yields:
                            sched_yield()
                            if words[at] >= number:
                                break
                            if monotonic() > give_up:
                                return alone
                        else:
                            return alone
            return finish(number, result)

        def finish(number: int, result: Any) -> Outcome:
            parity = number & 1
            if not ordered:
                fence()
            for at in entered:
                if words[at + their_digest + parity] != digest:
                    return disagreed
            reduce(parity, result)
            return done

        return run, finish
