"""A child forked from a rank is no rank: it is refused whatever it calls, and what it drops or closes stays."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from murmura import MurmuraError, Transport, run_world

LARGE = 1 << 20  # elements: freed memory of this size goes back to the system


def told(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except MurmuraError as error:
        return str(error)


def fork(transport: Transport, path: str) -> tuple[list[str], list[float]]:
    """What a child of rank 0 was told, call by call, and what the ranks still reach together afterwards."""
    rank = transport.rank
    dist.init_process_group("murmura", init_method=f"file://{path}", rank=rank, world_size=transport.world_size)
    small = [torch.ones(4) for _ in range(2)]
    for each in small:  # of which the next is prepared
        dist.all_reduce(each)
        transport.all_reduce(each)
    dropped: Any = transport.channel("dropped in the child")
    memory = transport.allocate(LARGE).fill_(5)
    queued: Any = dist.all_reduce(torch.ones(LARGE), async_op=True) if rank == 0 else None
    received: Any = dist.irecv(torch.ones(1), 1) if rank == 0 else None
    words: list[str] = []
    if rank == 0:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # which newer versions have for forks beside threads
            child = os.fork()
        if child == 0:
            calls: list[Callable[[], Any]] = [
                lambda: transport.all_reduce(torch.ones(4)),
                lambda: transport.all_reduce(torch.ones(4), async_op=True).wait(),
                lambda: transport.channel("of the child"),
                lambda: transport.allocate(4),
                lambda: dist.all_reduce(torch.ones(4)),
                lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
                lambda: dist.send(torch.ones(1), 1),
                lambda: queued.wait(),
                lambda: received.wait(),
            ]
            words = [told(call) for call in calls]
            dist.destroy_process_group()
            transport.close()
            del dropped, memory, queued, received, calls
            gc.collect()
            os.write(writer, json.dumps(words).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as file:
            words = json.loads(file.read())
        os.waitpid(child, 0)
    else:
        queued = dist.all_reduce(torch.ones(LARGE), async_op=True)
        dist.send(torch.ones(1), 0)
    if queued is not None:
        queued.wait()
    if received is not None:
        received.wait()
    for each in small:
        dist.all_reduce(each.fill_(rank + 1))
    sums = [each[0].item() for each in small]
    sums += [transport.all_reduce(torch.full((4,), rank + 1.0))[0].item(), dropped.all_reduce(torch.ones(1)).item()]
    dist.destroy_process_group()
    return words, [*sums, memory.sum().item() / LARGE]


def test_a_forked_child_is_refused_and_changes_nothing() -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = run_world(fork, 2, f"{folder}/store", kind="processes", timeout=30)
    words, _ = answers[0]
    assert len(words) == 9
    for each in words:
        assert each.startswith("this process was forked from rank 0 and is no rank itself"), each
    assert [sums for _, sums in answers] == [[3.0, 3.0, 3.0, 2.0, 5.0]] * 2
