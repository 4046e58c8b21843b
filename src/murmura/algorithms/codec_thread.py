"""A long exchange in pieces: one is encoded or decoded while another travels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from murmura.algorithms.checks import at_least_one
from murmura.compressors import Compressor
from murmura.errors import UsageError


def cut(numel: int, num_elements: int, compressor: Compressor, device: torch.device) -> list[tuple[int, int]]:
    """Bounds of pieces of about `num_elements` out of `numel`, such that they decode to the bits of the whole.

    One piece if the compressor allows no other, or on a GPU, which encodes faster than anything travels. The last one
    takes the remainder.
    """
    grain = None if device.type == "cuda" else compressor.grain
    if grain is None:
        return [(0, numel)]
    step = grain * max(1, num_elements // grain)
    starts = [index * step for index in range(max(1, numel // step))]
    return list(zip(starts, [*starts[1:], numel], strict=True))


class CodecThread:
    """Encodes and decodes in order, in a thread beside the exchanges; the thread is started when it is first needed.

    Whoever makes it closes it: an algorithm in its own `close`.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], None], *, num_pieces: int) -> Future[None]:
        """Run `work` on one of `num_pieces`; at once if that is the only one, for there is nothing to overlap with."""
        if not callable(work):
            raise UsageError(f"work={work!r} is no function.")
        at_least_one(num_pieces=num_pieces)
        if num_pieces == 1:
            work()
            future: Future[None] = Future()
            future.set_result(None)
            return future
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="murmura-codec")
        return self._executor.submit(torch.no_grad()(work))

    def close(self) -> None:
        """End the thread after what it does now; may be called again."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
