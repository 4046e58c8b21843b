"""Worlds of NCCL ranks on one GPU, kept alive between tests: it takes seconds to start one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from contracts import test_concurrency, test_exchange
from murmura import Transport
from murmura.tools.one_gpu import OneGPU
from worlds import SECONDS, World

SIZES = (2, 3, 4)
CALL_SECONDS = 150.0  # of a call on all ranks, below the time pytest gives a test, which would end all others with it


def arrive(transport: Transport, compiles: bool) -> int:
    """What a rank does first: it takes the GPU, meets the others and, if it `compiles`, starts the compiler.

    The compiler keeps semaphores, and would keep processes if it might have any.
    """
    transport.barrier()
    if compiles:
        from torch._inductor import config

        config.compile_threads = 1
        torch.compile(torch.sin)(torch.ones(8, device="cuda"))
    return transport.rank


@pytest.fixture(scope="session", params=SIZES, ids=lambda size: f"{size}_ranks")
def nccl(request: pytest.FixtureRequest) -> Iterator[OneGPU]:
    """NCCL ranks on one GPU, by MPS side by side."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with OneGPU(request.param, timeout=SECONDS, limit=CALL_SECONDS) as gpu:
        yield gpu


@pytest.fixture
def ranks_are_there(request: pytest.FixtureRequest) -> None:
    """Let the ranks meet: if the test before has ended them others are started, which must be there before a test."""
    if "nccl" in request.fixturenames:
        request.getfixturevalue("nccl").run(arrive, "compiled" in request.node.name)


@pytest.fixture(autouse=True)
def police(ranks_are_there: None, police: None) -> None:
    """As everywhere, but for the ranks that are kept."""


UNORDERED = (test_concurrency.flood, test_exchange.wait_on_a_channel, test_exchange.use_channels_in_threads)
"""Programs whose ranks use several channels in different orders, or in threads."""


def on_host_channels(transport: Transport, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` with channels in host memory: CUDA does not promise that kernels of two communicators run side by side."""
    transport.channel = transport.host_channel  # type: ignore[method-assign]
    try:
        return fn(transport, *args)
    finally:
        del transport.channel


class NcclWorld(World):
    """The world of the contract suites, on ranks that are there already."""

    gpu: OneGPU

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = SECONDS) -> list[Any]:
        if world_size != self.gpu.num_ranks:
            pytest.skip(f"it runs on {self.gpu.num_ranks} ranks now")
        if fn in UNORDERED:
            return self.gpu.run(on_host_channels, fn, *args)
        return self.gpu.run(fn, *args)


@pytest.fixture
def world(nccl: OneGPU) -> World:
    """What the contract suites ask for."""
    world = NcclWorld("nccl", "processes", "nccl", exact=False, hops=True, checks=False, checks_messages=False)
    object.__setattr__(world, "gpu", nccl)
    return world
