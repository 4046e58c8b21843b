"""The tail of a round: what ranks exchange once a round, beside their gradients.

It holds whether each parameter was used here, this rank's share of data, and a fingerprint of the round's number and
the layout of the buckets. One small all-reduce averages them. From the means every rank sees unused parameters, uneven
data and disagreement between ranks, whatever the algorithm does with the gradients.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from murmura.buckets import Bucket
from murmura.errors import CollectiveMismatch
from murmura.transports.base import Transport
from murmura.transports.cuda_streams import is_done
from murmura.types import ReduceOp


class DataShares(NamedTuple):
    """How much of a round's batches is data: 1.0, or less where a rank has run out of it."""

    own: float  # on this rank
    mean: float  # over the ranks, known on all of them when the first bucket is sent
    weighs: bool  # whether the mean gradient is that of the data


class Contents(NamedTuple):
    """The means over the ranks."""

    used: list[float]  # the share of the ranks on which each parameter got a gradient, in the order of the buckets
    weight: float
    fingerprint: float


class Tail:
    """The tail of the rounds that use `buckets`; written and read in the user's thread, exchanged in another.

    On a GPU the host must not wait in every round: there `read` is left out unless something was unused or replayed,
    and the fingerprint is compared when the next tail is written, or before the state is saved or the model closed.
    """

    def __init__(self, buckets: Sequence[Bucket], transport: Transport) -> None:
        self._transport = transport
        self._first_name = buckets[0].names[0]
        self._layout = zlib.crc32(";".join(",".join(bucket.names) for bucket in buckets).encode())
        length = sum(len(bucket.parameters) for bucket in buckets) + 2
        device = buckets[0].flat.device
        self.values = transport.allocate(length, torch.float64, device)
        self._on_cuda = device.type == "cuda"
        self._written = torch.empty(length, dtype=torch.float64, pin_memory=self._on_cuda)
        self._staging = torch.empty(length, dtype=torch.float64, pin_memory=self._on_cuda)
        self._copied: torch.cuda.Event | None = None  # of the copy of the last tail to `_staging`
        self._unread: int | None = None  # the round of that tail
        self._own = self._written.numpy()
        self._flags: tuple[float, ...] = ()  # what it begins with, as it was written last
        self._all_used = False

    def write(self, used: Sequence[bool], weight: float, number: int) -> None:
        """Write this rank's values for round `number`."""
        self.check_unread()
        flags = *used, weight
        if flags != self._flags:
            self._flags, self._all_used = flags, all(used)
            self._own[:-1] = flags
        self._own[-1] = self._fingerprint(number)
        self.values.copy_(self._written, non_blocking=True)
        self._number = number

    def exchange(self) -> None:
        """Overwrite the tail with its mean over the ranks."""
        self._transport.all_reduce_own(self.values, ReduceOp.MEAN)
        if self._on_cuda:
            self._staging.copy_(self.values, non_blocking=True)
            self._copied = torch.cuda.current_stream(self.values.device).record_event()
            self._unread = self._number

    def must_be_read(self, weighs: bool) -> bool:
        """Whether `read` is needed; on a CPU it costs nothing and is always done."""
        return weighs or not self._on_cuda or not self._all_used

    def read(self, number: int) -> Contents:
        """The means of round `number`; waits for a GPU. Raises `CollectiveMismatch` if they are another round's."""
        self._unread = None
        contents = self._contents()
        self._check_fingerprint(contents, number)
        return contents

    def _contents(self) -> Contents:
        if self._copied is not None:
            while not is_done(self._copied) and not self._transport.failed:  # a group of the user's is never aborted
                time.sleep(0.0002)
            if self._transport.failed:  # the all-reduce was aborted: its result is not valid
                self._transport.check_usable()
        *used, weight, fingerprint = (self._staging if self._on_cuda else self.values).tolist()
        return Contents(used, weight, fingerprint)

    def check_unread(self) -> None:
        """Compare the fingerprint of the last round, if it was not read; waits for a GPU that has not come to it."""
        if self._unread is not None:
            number, self._unread = self._unread, None
            self._check_fingerprint(self._contents(), number)

    def _fingerprint(self, number: int) -> float:
        return float(self._layout + number)  # a few more than 32 bits: sums over ranks are exact in float64

    def _check_fingerprint(self, contents: Contents, number: int) -> None:
        if contents.fingerprint != self._fingerprint(number):
            rank = self._transport.world_ranks[self._transport.rank]
            raise CollectiveMismatch(
                f"rank {rank}: in round {number}, the buckets (first parameter {self._first_name!r}) met other ranks' "
                "buckets of another round or layout. Every rank must run the same number of synchronising backwards, "
                "on the same model."
            )
