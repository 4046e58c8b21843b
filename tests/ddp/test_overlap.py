"""Buckets travel while backward goes on, from memory that the transport reaches, and are written at most once."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddp.models import on_ranks, values
from murmura import DDP, InProcessTransport, Transport, run_world
from murmura.algorithms import Algorithm, AlgorithmImpl
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from murmura.buckets import Bucket
from murmura.transports import stalls
from worlds import SECONDS


class AnnouncedImpl(GradientAllReduceAlgorithmImpl):
    def __init__(self, process_group: Transport, reduced: list[threading.Event]) -> None:
        super().__init__(process_group)
        self.reduced = reduced

    def on_bucket_ready(self, bucket: Bucket) -> None:
        super().on_bucket_ready(bucket)
        self.reduced[bucket.index].set()


@dataclass(frozen=True)
class Announced(Algorithm):
    """Gradient all-reduce that says which buckets are reduced."""

    impl: ClassVar[type[AlgorithmImpl]] = AnnouncedImpl
    reduced: list[threading.Event] = field(default_factory=list)


class DelayedImpl(GradientAllReduceAlgorithmImpl):
    def __init__(self, process_group: Transport, until: threading.Event) -> None:
        super().__init__(process_group)
        self.until = until

    def on_bucket_ready(self, bucket: Bucket) -> None:
        assert self.until.wait(SECONDS)
        super().on_bucket_ready(bucket)


@dataclass(frozen=True)
class Delayed(Algorithm):
    """Gradient all-reduce that begins after an event."""

    impl: ClassVar[type[AlgorithmImpl]] = DelayedImpl
    until: threading.Event = field(default_factory=threading.Event)


class WaitInBackward(nn.Module):
    """The identity; backward waits in it for an event."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event
        self.came = False

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        out.register_hook(self.wait)
        return out

    def wait(self, gradient: Tensor) -> None:
        self.came = self.event.wait(SECONDS)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_bucket_is_reduced_while_backward_goes_on(num_ranks: int) -> None:
    """Backward cannot reach the first layer before the bucket of the last one has been exchanged."""

    def run(transport: Transport) -> tuple[bool, list[bool]]:
        reduced = [threading.Event() for _ in range(2)]
        wait = WaitInBackward(reduced[0])
        model = nn.Sequential(nn.Linear(2, 2, bias=False), wait, nn.Linear(2, 2, bias=False))
        ddp = DDP(model, transport, algorithm=Announced(reduced), bucket_size_bytes=1)
        ddp(values(3, 2, seed=transport.rank)).sum().backward()
        return wait.came, [event.is_set() for event in reduced]

    assert on_ranks(run, num_ranks) == [(True, [True, True])] * num_ranks


class ThreadsImpl(GradientAllReduceAlgorithmImpl):
    def __init__(self, process_group: Transport, seen: list[threading.Thread]) -> None:
        super().__init__(process_group)
        self.seen = seen

    def on_bucket_ready(self, bucket: Bucket) -> None:
        super().on_bucket_ready(bucket)
        self.seen.append(threading.current_thread())


@dataclass(frozen=True)
class Threads(Algorithm):
    """Gradient all-reduce that says in which threads buckets are reduced."""

    impl: ClassVar[type[AlgorithmImpl]] = ThreadsImpl
    seen: list[threading.Thread] = field(default_factory=list)


@pytest.mark.parametrize("spare", [True, False])
def test_without_a_spare_core_buckets_are_reduced_after_backward_in_its_thread(
    spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessTransport, "has_spare_core", lambda self: spare)

    def run(transport: Transport) -> tuple[set[bool], int, Tensor]:
        seen: list[threading.Thread] = []
        num_seen: list[int] = []
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(1.0)
        ddp = DDP(model, transport, algorithm=Threads(seen), bucket_size_bytes=1)
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: num_seen.append(len(seen)))
        ddp(torch.full((1, 2), float(transport.rank))).sum().backward()
        here = {thread is threading.current_thread() for thread in seen}
        assert model[0].weight.grad is not None
        return here, num_seen[0] if not spare else 0, model[0].weight.grad

    for in_thread_of_backward, num_before_the_end, gradient in on_ranks(run, 2):
        assert in_thread_of_backward == {not spare}
        assert num_before_the_end == 0
        assert torch.equal(gradient, torch.full((2, 2), 1.0))


@pytest.mark.parametrize("spare", [True, False])
def test_a_backward_inside_autocast_exchanges_in_the_dtypes_of_gradients(
    spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PowerSGD multiplies matrices, in the thread of backward too: autocast would make bfloat16 of the factors."""
    monkeypatch.setattr(InProcessTransport, "has_spare_core", lambda self: spare)

    def run(transport: Transport) -> Tensor:
        torch.manual_seed(0)
        ddp = DDP(nn.Linear(16, 16), transport, algorithm="powersgd")
        with torch.autocast("cpu", torch.bfloat16):
            ddp(torch.full((1, 16), 1.0 + transport.rank)).square().sum().backward()
        ddp.close()
        assert ddp.module.weight.grad is not None
        return ddp.module.weight.grad

    first, second = on_ranks(run, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, first.bfloat16().float())


def count_spare_cores(transport: Transport, num_cores: int) -> list[bool]:
    os.sched_getaffinity = lambda pid: set(range(num_cores))  # type: ignore[assignment]
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found.append(transport.channel("another").has_spare_core())
    return found


@pytest.mark.parametrize(("num_cores", "expected"), [(2, [False, False]), (4, [True, False]), (5, [True, True])])
def test_processes_have_a_spare_core_if_torch_leaves_one(num_cores: int, expected: list[bool]) -> None:
    assert run_world(count_spare_cores, 2, num_cores, kind="processes") == [expected] * 2


def test_inside_no_sync_nothing_travels() -> None:
    def run(transport: Transport) -> list[bool]:
        reduced = [threading.Event()]
        ddp = DDP(nn.Linear(2, 2, bias=False), transport, algorithm=Announced(reduced))
        with ddp.no_sync():
            ddp(values(3, 2, seed=transport.rank)).sum().backward()
        seen = [reduced[0].is_set()]
        ddp.sync_gradients()
        return [*seen, reduced[0].is_set()]

    assert on_ranks(run, 2) == [[False, True]] * 2


class CountCopies(TorchDispatchMode):
    """Counts, by size, the copies that torch makes in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.by_numel: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.by_numel[args[0].numel()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("spare", "num_cores"), [(False, 64), (True, 2), (True, 3)])
def test_a_gradient_is_copied_once_at_most(spare: bool, num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the tensor that autograd made into the bucket; not where autograd adds to what is there, nor alone.

    A communication thread that has a core for itself copies; the training thread then copies nothing. Two ranks leave
    it none of two cores, even where exchanges only wait and so run beside backward.
    """
    copied: list[Tensor] = []

    def copy_in(self: Bucket, gradients: dict[int, Tensor], *, as_views: bool = True) -> bool:
        copied.extend(gradients.values())
        return copy(self, gradients, as_views=as_views)

    copy = Bucket.copy_in
    monkeypatch.setattr(Bucket, "copy_in", copy_in)
    monkeypatch.setattr(InProcessTransport, "has_spare_core", lambda self: spare)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))

    def run(transport: Transport) -> list[int]:
        ddp = DDP(nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)), transport)
        seen = []
        for set_to_none in (True, True, False):
            ddp.zero_grad(set_to_none=set_to_none)
            with CountCopies() as copies:
                ddp(values(3, 7, seed=transport.rank)).sum().backward()
            seen.append(copies.by_numel[49])
        return seen

    assert on_ranks(run, 2) == [[0, 0, 0] if spare and num_cores > 2 else [2, 2, 0]] * 2
    assert len(copied) == 2 * 4
    assert on_ranks(run, 1) == [[0, 0, 0]]


def test_cores_are_counted_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counter[int]()

    def has_spare_core(self: Transport) -> bool:
        asked[self.rank] += 1
        return True

    monkeypatch.setattr(InProcessTransport, "has_spare_core", has_spare_core)

    def run(transport: Transport) -> int:
        ddp = DDP(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))), transport)
        ddp(values(1, 2, seed=0)).sum().backward()
        before = asked[transport.rank]
        ddp(values(1, 2, seed=0)).sum().backward()
        return asked[transport.rank] - before

    assert on_ranks(run, 2) == [1, 1]


def test_a_slow_exchange_holds_back_the_gradients_of_two_buckets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The communication thread copies gradients when it comes to their bucket; what this takes in memory is bounded."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    names = ["first", "second", "third", "fourth"]

    def run(transport: Transport) -> list[str]:
        layers = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in names))
        end_of_backward = threading.Event()
        ddp = DDP(layers, transport, algorithm=Delayed(end_of_backward), bucket_size_bytes=1)
        outside: list[str] = []

        def look(gradient: Tensor) -> None:
            views = {id(view) for bucket in ddp._replica.buckets for view in bucket.views}
            gradients = [each.weight.grad for each in reversed(layers)]
            outside.extend(
                name for name, each in zip(names, gradients, strict=True) if id(each) not in {id(None), *views}
            )
            end_of_backward.set()

        x = values(2, 3, seed=transport.rank).requires_grad_()
        x.register_hook(look)  # backward comes to it last
        ddp(x).sum().backward()
        return outside

    for outside in on_ranks(run, 2):
        assert outside in (["first", "second"], ["second"])  # whether the first has been copied is a matter of time


def lies_in_the_shared_segment(tensor: Tensor) -> bool:
    """Whether a mapping of the library's nameless memory holds it all."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= last:
            return "memfd:murmura" in line
    return False


def train_and_look(transport: Transport) -> list[bool]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    ddp = DDP(model, transport, bucket_size_bytes=64)
    ddp(values(3, 3, seed=transport.rank)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    seen = [lies_in_the_shared_segment(gradient) for gradient in gradients]
    ddp.close()
    return [*seen, lies_in_the_shared_segment(model[0].weight)]


def test_gradients_of_processes_lie_in_memory_that_all_ranks_reach() -> None:
    assert run_world(train_and_look, 2, kind="processes", timeout=SECONDS) == [[True] * 4 + [False]] * 2


# One thread for one model


def step_beside_a_late_rank(transport: Transport) -> tuple[list[str], list[str]]:
    """Rank 1 is late until rank 0 has warned; the communication threads of the model, and what was warned."""
    ddp = DDP(nn.Linear(2, 2), transport)
    warnings: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not warnings:
                transport.send(torch.ones(1), 1)
            warnings.append(record.getMessage())

    if transport.rank == 0:
        stalls.WARN_SECONDS = 0.0
        stalls.log.addHandler(Handler())
    else:
        transport.recv(torch.empty(1), 0)
    ddp(torch.ones(1, 2)).sum().backward()
    threads = [thread.name for thread in threading.enumerate() if ddp._replica.transport.name in thread.name]
    ddp.close()
    return threads, warnings


def test_a_model_has_one_thread_over_gloo_and_warns_of_a_late_rank() -> None:
    results = run_world(step_beside_a_late_rank, 2, kind="processes", transport="gloo", timeout=SECONDS)
    assert [len(threads) for threads, _ in results] == [1, 1]
    assert "rank 0 has waited 1 s for rank 1 in bucket 0 (first parameter 'bias') of round 0" in results[0][1][0]
