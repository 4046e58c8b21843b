"""ThrottledTransport: the link of a slow network, on the real clock.

Each rank has one link, full duplex: what it sends shares the link's rate in one direction, what it receives in the
other. An exchange takes latency + max(bytes sent, bytes received) / rate, from when both sides have come to it; a
collective is a ring or a tree of such exchanges, so its time is the formula's.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Sequence
from typing import Self

from murmura.collectives.deadline import Deadline
from murmura.errors import ConfigError
from murmura.transports.base import Pairs, Transport
from murmura.transports.decorators.base import TransportWrapper

__all__ = ["ThrottledTransport", "parse_rate"]

SLACK_SECONDS = 0.003

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_rate(rate: str) -> float:
    """Bytes per second of "100mbit", "1gbit", "2.5gbit"."""
    parts = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(k|m|g)?bit", str(rate).strip().lower())
    if parts is None or float(parts[1]) == 0:
        raise ConfigError(f"bandwidth={rate!r}: write bits per second as '100mbit', '1gbit' or '2.5gbit'.")
    return float(parts[1]) * _UNITS[f"{parts[2] or ''}bit"] / 8


class _Link:
    """The link of one rank: it carries what all channels send one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0  # when it has carried what came before

    def carry(self, began: float, seconds: float) -> float:
        """Return when the link will have carried an exchange that began at `began`, is met now, and takes `seconds`."""
        with self._lock:
            met = time.monotonic()
            # Ranks that begin at once after their last exchange, and meet at once, lose no time on the link to thread
            # switches and to the copy itself.
            went_on = began - self._free_at < SLACK_SECONDS and met - began < SLACK_SECONDS
            self._free_at = (self._free_at if went_on else max(met, self._free_at)) + seconds
            return self._free_at


class ThrottledTransport(TransportWrapper):
    """`transport` behind a link of `bandwidth` and `latency` seconds. Closing it closes the transport inside."""

    def __init__(self, transport: Transport, bandwidth: str = "100mbit", latency: float = 0.0) -> None:
        if isinstance(latency, bool) or not isinstance(latency, int | float) or not 0 <= latency < math.inf:
            raise ConfigError(f"latency={latency!r}: give seconds, 0 or more.")
        super().__init__(transport)
        self.bytes_per_second = parse_rate(bandwidth)
        self.sent_bytes = 0
        self._bandwidth, self._latency = bandwidth, latency
        self._link = _Link()

    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        sent = sum(tensor.nbytes for tensor, _ in sends)
        received = sum(out.nbytes for out, _ in recvs)
        # On a GPU the host has to wait too: the link, which is simulated on the real clock, is not taken before the
        # tensors are there, nor is its time over before they have been exchanged.
        on_gpu = any(tensor.is_cuda for tensor, _ in (*sends, *recvs))
        if on_gpu:
            self.inner.await_current_stream()
        began, deadline = time.monotonic(), Deadline(self.seconds(timeout))
        self.inner.exchange(sends, recvs, timeout=timeout)
        if on_gpu:
            self.inner.await_current_stream()
        self.sent_bytes += sent
        seconds = self._latency + max(sent, received) / self.bytes_per_second
        peers = sorted({peer for _, peer in (*sends, *recvs)})
        self._pass_time(self._link.carry(began, seconds), deadline, peers)

    def wrap(self, split: Transport) -> Self:
        throttled = type(self)(split, self._bandwidth, self._latency)
        throttled._link = self._link  # a rank has one link, however many channels use it
        return throttled

    def compare_calls(self, call: str, timeout: float | None) -> None:
        # Comparing calls is the business of the transport inside, and costs nothing on the link.
        name = self.operation.partition(" ")[0]
        self.inner.run_in_turn(name, lambda: self.inner.compare_calls(call, timeout))

    def _pass_time(self, until: float, deadline: Deadline, peers: Sequence[int]) -> None:
        while (left := until - time.monotonic()) > 0:
            if deadline.remaining <= 0:
                state = f"The link of {self._bandwidth} needs longer."
                raise self.reporter.timed_out(peers, self.operation, deadline.waited, state)
            if self._ended.wait(min(left, max(0.0, deadline.remaining))):
                if self.failure is not None:  # aborted by another thread
                    raise self.reporter.aborted(self.failure, self.operation, deadline.waited)
                raise self.reporter.closed(self.operation)
