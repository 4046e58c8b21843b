"""Training steps as contestants: each wraps a module of its own, and all see the same data in the same order."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from murmura import DDP, Algorithm, Transport, __version__
from murmura.tools.bench.harness import Contestant
from murmura.tools.bench.models import Batch, Model
from murmura.tools.experiments.process_groups import LOOPBACK, gloo_group
from murmura.tools.experiments.recipes import described
from murmura.tools.lab.network import Counters

NUM_BATCHES = 8  # of data, in rotation
PHASES = ("forward", "backward", "optimizer")
CPU = 1 + len(PHASES)  # where the figures of a batch hold the processor time; the interface's bytes and packets follow
SENT_BYTES, SENT_PACKETS, BURST_BYTES = CPU + 1, CPU + 2, CPU + 3
QUIET = 0.02  # the share of a batch's bytes below which a step counts as one that sends nothing


def nothing() -> None:
    """Close a contestant that holds no resources."""


def plain_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Wrapped:
    """A module under one contestant."""

    forward: nn.Module  # what to call for the forward pass
    backward: Callable[[Tensor], None] = plain_backward  # runs the backward pass on a loss
    close: Callable[[], None] = nothing  # releases its resources


@dataclass(frozen=True)
class Method:
    """One way to take a training step; see `Contestant` for `name` and `about`."""

    name: str
    about: str
    wrap: Callable[[nn.Module], Wrapped]  # takes a module, on every rank; it trains that very module
    averages: bool = True  # whether the ranks end a step with the mean of their gradients
    optimizer: Callable[[nn.Module], Optimizer] | None = None  # makes the optimizer; None is the model's own


class TrainingStep(Contestant):
    """A method with its module, its optimizer, and its place in the data.

    The figures of a batch are the seconds of a step, of each of its `PHASES`, and the processor time of all threads. If
    `traffic` counts what this host's interface carries, the bytes and packets sent follow, and the bytes of the longest
    burst (consecutive steps that all send something), or 0 unless `counts_bursts`.
    """

    counts_bursts = False

    def __init__(
        self,
        method: Method,
        recipe: Model,
        module: nn.Module,
        data: Sequence[Batch],
        transport: Transport,
        traffic: Callable[[], Counters] | None = None,
    ) -> None:
        super().__init__(method.name, method.about)
        self.method = method
        self.module = module
        self._recipe = recipe
        self._data = data
        self._transport = transport
        self._traffic = traffic
        self._optimizer = (method.optimizer or recipe.optimizer)(module)
        self._num_steps = 0
        self._wrapped = method.wrap(module)
        self.close = self._wrapped.close

    def differentiate(self) -> tuple[float, float]:
        """Forward and backward on the next batch of data; the times at which they ended."""
        inputs, targets = self._data[self._num_steps % len(self._data)]
        loss = self._recipe.loss(self._wrapped.forward(inputs), targets)
        forward = time.perf_counter()
        self._wrapped.backward(loss)
        return forward, time.perf_counter()

    def finish_step(self) -> None:
        """The optimizer's part of a step."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_steps += 1

    def run_batch(self, number: int) -> list[float]:
        self._transport.barrier()
        before = self._traffic() if self._traffic else None
        spent = [0.0] * len(PHASES)
        sent_by_step: list[int] = []
        cpu_began, began = time.process_time(), time.perf_counter()
        last = began
        for _ in range(self.batch):
            forward, backward = self.differentiate()
            self.finish_step()
            ended = time.perf_counter()
            for phase, seconds in enumerate((forward - last, backward - forward, ended - backward)):
                spent[phase] += seconds
            last = ended
            if self._traffic and self.counts_bursts:
                sent_by_step.append(self._traffic().tx_bytes)
        figures = [last - began, *spent, time.process_time() - cpu_began]
        if self._traffic and before:
            self._transport.barrier()  # what was sent has arrived
            sent = self._traffic() - before
            figures += [float(sent.tx_bytes), float(sent.tx_packets)]
            steps = [before.tx_bytes, *sent_by_step, before.tx_bytes + sent.tx_bytes]
            burst = longest_burst([after - earlier for earlier, after in itertools.pairwise(steps)])
            return [*(figure / self.batch for figure in figures), burst if sent_by_step else 0.0]
        return [figure / self.batch for figure in figures]


def longest_burst(sent: Sequence[int]) -> float:
    """The most bytes sent in consecutive steps that all sent something; `sent` has the bytes of each step."""
    longest = current = 0
    for each in sent:
        current = current + each if each > QUIET * sum(sent) else 0
        longest = max(longest, current)
    return float(longest)


def prepare(
    transport: Transport, methods: Sequence[Method], recipe: Model, traffic: Callable[[], Counters] | None = None
) -> list[TrainingStep]:
    """A contestant for each method; all start from the same parameters."""
    module, data = recipe.build(), recipe.batches(transport.rank, NUM_BATCHES)
    return [TrainingStep(method, recipe, copy.deepcopy(module), data, transport, traffic) for method in methods]


# Ways to take a step


def bare(name: str) -> Method:
    return Method(name, "the module alone, no communication", Wrapped, averages=False)


def murmura_ddp(name: str, transport: Transport, *, algorithm: Algorithm | None = None, **options: Any) -> Method:
    """murmura's DDP as it comes: buckets travel while backward runs."""

    def wrap(module: nn.Module) -> Wrapped:
        ddp = DDP(module, transport, algorithm=algorithm, **options)
        return Wrapped(ddp, close=ddp.close)

    return Method(name, _about(transport, algorithm, options), wrap)


def held_back(name: str, transport: Transport, **options: Any) -> Method:
    """The same with nothing in flight while backward runs."""

    def wrap(module: nn.Module) -> Wrapped:
        ddp = DDP(module, transport, **options)

        def backward(loss: Tensor) -> None:
            with ddp.no_sync():
                plain_backward(loss)
            ddp.sync_gradients()

        return Wrapped(ddp, backward, close=ddp.close)

    return Method(name, f"{_about(transport, None, options)}, no_sync() and then sync_gradients()", wrap)


def _about(transport: Transport, algorithm: Algorithm | None, options: dict[str, Any]) -> str:
    given = "".join(f", {name}={value}" for name, value in options.items())
    algorithm_words = f"{described(algorithm)}, " if algorithm is not None else ""
    return f"{algorithm_words}DDP of murmura {__version__}, {type(transport).__name__}{given}"


def torch_ddp(name: str, transport: Transport, store_file: Path) -> Method:
    """torch's DDP on a Gloo group of its own, over loopback."""
    group = gloo_group(transport, store_file)

    def wrap(module: nn.Module) -> Wrapped:
        return Wrapped(nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True))

    about = (
        f"DistributedDataParallel of torch {torch.__version__}, gradient_as_bucket_view=True, Gloo: TCP on {LOOPBACK}"
    )
    return Method(name, about, wrap)
