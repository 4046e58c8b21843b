"""An all-reduce of a small tensor, prepared once for each tensor so that a call is a dozen bytecodes.

Every rank copies its input into its slot, enters, and sums all slots in rank order: one synchronisation. Two slots
by parity suffice: a rank enters the collective after next only when all have entered the next, and so have left this.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmura.collectives.reduction import HALVES, Reduction
from murmura.transports.shared_memory.board import DIGEST, YIELDS, Board, digest_of, slot_bytes
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


class OneShot:
    """The prepared all-reduce of whatever tensor of this shape and dtype lies at this address.

    It holds no reference to the tensor: it is looked up by address, shape and dtype of a tensor that is alive.
    """

    def __init__(self, board: Board, tensor: Tensor, op: ReduceOp, call: str) -> None:
        self.call = call
        self._board = board
        self._digest = digest_of(call)
        dtype, num_bytes = tensor.detach().numpy().dtype, tensor.nbytes
        raw: Any = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(tensor.data_ptr()))
        self._result: Any = raw.view(dtype)
        self._source = memoryview(raw)
        segment = board.segment
        self._target = [
            segment.memory[place : place + num_bytes]
            for place in (board.slots[parity][board.rank] for parity in (0, 1))
        ]
        self._inputs: list[list[Any]] = [
            [segment.bytes[place : place + num_bytes].view(dtype) for place in board.slots[parity]] for parity in (0, 1)
        ]
        self._reduce = Reduction(op, tensor.dtype, board.world_size, torch.device("cpu")).reduce
        self._peers = [board.at[peer] for peer in board.peers]

    def publish(self, number: int) -> None:
        """Bring this rank's input and enter collective `number`."""
        board = self._board
        parity = number & 1
        self._target[parity][:] = self._source
        board.words[board.own + DIGEST + parity] = self._digest
        board.publish(0, number)

    def arrived(self, number: int) -> bool:
        """Spin, then yield, until all peers have entered; False if that took too long and the caller should sleep."""
        board = self._board
        words = board.words
        for at in self._peers:
            if words[at] >= number:
                continue
            for _ in range(board.spins):
                if words[at] >= number:
                    break
            else:
                for _ in range(YIELDS):
                    os.sched_yield()
                    if words[at] >= number:
                        break
                else:
                    return False
        return True

    def agreed(self, number: int) -> bool:
        words, digest, word = self._board.words, self._digest, DIGEST + (number & 1)
        for at in self._peers:  # noqa: SIM110 (a generator costs more than the loop)
            if words[at + word] != digest:
                return False
        return True

    def reduce(self, number: int) -> None:
        self._reduce(self._inputs[number & 1], self._result)
