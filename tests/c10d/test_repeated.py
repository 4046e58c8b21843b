"""Small all-reduces that are called again and again, on memory that becomes another tensor in between."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from c10d.groups import run
from murmura import CollectiveMismatch
from murmura.integrations.c10d.repeated_all_reduces import NUM_KNOWN


def views(memory: Tensor) -> list[Tensor]:
    """Tensors at one address that differ in dtype, shape or strides."""
    row = memory.view(torch.float32)
    return [
        row[:64],
        row[:64].view(8, 8).t(),
        row[:128].view(64, 2)[:, 0],
        row[:32],
        memory.view(torch.float64)[:32],
        memory.view(torch.int32)[:64],
        memory.view(torch.bool)[:256],
    ]


def reduce_again_and_again() -> None:
    rank, memory = dist.get_rank(), torch.zeros(1024, dtype=torch.uint8)
    ops = [(dist.ReduceOp.SUM, 5), (dist.ReduceOp.MAX, 3), (dist.ReduceOp.PRODUCT, 6), (dist.ReduceOp.SUM, 5)]
    for _ in range(3):
        for tensor in views(memory):
            for op, result in ops:
                for way in ("sync", "async", "thread", "group"):
                    memory.zero_()
                    tensor.fill_(rank + 2)
                    reduce(tensor, op, way)
                    wanted = torch.full_like(tensor, result)
                    assert torch.equal(tensor, wanted), (tensor.dtype, tensor.stride(), op, way)
                    tensor.zero_()
                    assert not memory.any(), "something beside the tensor was written"


def reduce(tensor: Tensor, op: Any, way: str) -> None:
    if way == "thread":
        thread = threading.Thread(target=dist.all_reduce, args=(tensor, op))
        thread.start()
        thread.join()
    elif way == "group":
        opts = dist.AllreduceOptions()
        opts.reduceOp = op
        work = dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([tensor], opts)
        assert torch.equal(work.get_future().wait()[0], tensor)
    elif way == "async":
        work = dist.all_reduce(tensor, op, async_op=True)
        assert work is not None
        assert work.wait()
    else:
        dist.all_reduce(tensor, op)


def test_memory_that_becomes_another_tensor_is_reduced_as_what_it_is() -> None:
    run(reduce_again_and_again, 2)


def reduce_at_ever_other_places() -> int:
    """How many operations ran that were not prepared."""
    rank, memory = dist.get_rank(), torch.zeros(64 * (NUM_KNOWN + 200))
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    unprepared: list[Any] = []
    all_reduce = group._all_reduce
    group._all_reduce = lambda *args: unprepared.append(args) or all_reduce(*args)
    for place in range(0, memory.numel(), 64):
        tensor = memory[place : place + 32]
        if place % 640 == 0:
            tensor = memory[place : place + 64][::2] if place % 1280 else memory[place : place + 32].view(2, 16).t()
        tensor.fill_(rank + 2)
        reduce(tensor, dist.ReduceOp.SUM, "async" if place % 192 == 0 else "sync")
        assert torch.equal(tensor, torch.full_like(tensor, 5)), place
        tensor.zero_()
        assert not memory[max(0, place - 64) : place + 128].any(), "something beside the tensor was written"
    return len(unprepared)


def test_a_tensor_at_another_place_is_reduced_as_one_that_was_seen() -> None:
    num_strided = (NUM_KNOWN + 200 + 9) // 10
    assert run(reduce_at_ever_other_places, 2) == [num_strided + 1] * 2  # and the first contiguous one


def reduce_in_queue() -> list[float]:
    tensors = [torch.ones(8) for _ in range(4)]
    for _ in range(3):
        for tensor in tensors:
            dist.all_reduce(tensor.fill_(1.0))
    works = [dist.all_reduce(tensor.fill_(1.0), async_op=True) for tensor in tensors]
    dist.all_reduce(tensors[0])  # after the one that is queued for it
    assert all(work is not None and work.is_completed() for work in works)
    return [tensor[0].item() for tensor in tensors]


def test_a_synchronous_call_comes_after_what_is_queued() -> None:
    assert run(reduce_in_queue, 2) == [[4.0, 2.0, 2.0, 2.0]] * 2


def reduce_other_length(async_op: bool) -> str:
    tensor = torch.ones(64)
    for _ in range(3):
        dist.all_reduce(tensor)
        dist.all_reduce(tensor[:32])
    try:
        work = dist.all_reduce(tensor[: 32 * (1 + dist.get_rank())], async_op=async_op)
        if work is not None:
            work.wait()
    except CollectiveMismatch as error:
        return str(error)
    return ""


def test_a_repeated_call_that_others_do_not_make_gets_the_table() -> None:
    for async_op in (False, True):
        for text in run(reduce_other_length, 2, async_op):
            assert "float32[32]" in text
            assert "float32[64]" in text


def profile_repeated() -> list[str]:
    tensor = torch.ones(8)
    for _ in range(3):
        dist.all_reduce(tensor)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
    assert tensor[0].item() == 2.0**5
    return [event.name for event in profiler.events() if event.name.startswith("c10d::")]


def test_repeated_calls_are_events_of_the_profiler() -> None:
    assert run(profile_repeated, 2) == [["c10d::allreduce_"] * 2] * 2
