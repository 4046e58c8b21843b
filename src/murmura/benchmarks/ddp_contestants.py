"""Who competes in a training step: each contestant wraps a module, and does its part of the backward pass.

All start from the same parameters and see the same data; what differs is how, and whether, gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from murmura import DDP, Transport, __version__
from murmura.benchmarks.contestants import GLOO_HOST
from murmura.benchmarks.ddp_spec import DDPPeer

MURMURA = "murmura"
HELD_BACK = "murmura no overlap"
BARE = "bare"
OVERLAPPED, NOT_OVERLAPPED, DEFAULT_BUCKETS = "overlapped", "not overlapped", "default buckets"  # on the slow link
SMALL_BUCKET_BYTES = 2**20  # small enough for the gradients of any model to leave in several parts


def nothing() -> None:
    """What closing a contestant that holds nothing takes."""


def plain_backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Wrapped:
    """A module under one contestant: what to call for the forward pass, how to run backward, how to let go."""

    forward: nn.Module
    backward: Callable[[Tensor], None] = plain_backward
    close: Callable[[], None] = nothing


@dataclass(frozen=True)
class Contestant:
    """One way to take a training step.

    Attributes:
        name: as the report has it.
        about: what it is, with versions.
        wrap: takes a module, on every rank; it trains that very module.
        averages: whether the ranks end up with the mean of their gradients.
    """

    name: str
    about: str
    wrap: Callable[[nn.Module], Wrapped]
    averages: bool = True


def step_names(peers: tuple[DDPPeer, ...], world_size: int) -> list[str]:
    """Who competes in an ordinary step, in the order of the table."""
    return [MURMURA, *([HELD_BACK] if world_size > 1 else []), *peers, BARE]


def step_contestant(name: str, transport: Transport, folder: Path) -> Contestant:
    """The contestant of an ordinary step; called by every rank. `folder` is shared and was empty before the first."""
    if name == MURMURA:
        return overlapped(name, transport)
    if name == HELD_BACK:
        return held_back(name, transport)
    if name == DDPPeer.TORCH_DDP:
        return torch_ddp(transport, folder / name)
    assert name == BARE, name
    return Contestant(BARE, "the module alone, no communication", Wrapped, averages=False)


def overlap_contestants(transport: Transport) -> list[Contestant]:
    """murmura on a slow link: communicating while backward runs, and after it.

    Both in small buckets, and the first also in those that DDP makes by default: the last bucket leaves when backward
    ends, so what it holds cannot overlap.
    """
    return [
        overlapped(OVERLAPPED, transport, SMALL_BUCKET_BYTES),
        held_back(NOT_OVERLAPPED, transport, SMALL_BUCKET_BYTES),
        overlapped(DEFAULT_BUCKETS, transport),
    ]


def overlapped(name: str, transport: Transport, bucket_bytes: int | None = None) -> Contestant:
    """murmura's DDP as it comes: buckets travel while backward runs."""

    def wrap(module: nn.Module) -> Wrapped:
        ddp = _wrap(module, transport, bucket_bytes)
        return Wrapped(ddp, close=ddp.close)

    return Contestant(name, _about(transport, bucket_bytes), wrap)


def held_back(name: str, transport: Transport, bucket_bytes: int | None = None) -> Contestant:
    """The same with nothing in flight while backward runs."""

    def wrap(module: nn.Module) -> Wrapped:
        ddp = _wrap(module, transport, bucket_bytes)

        def backward(loss: Tensor) -> None:
            with ddp.no_sync():
                plain_backward(loss)
            ddp.sync_gradients()

        return Wrapped(ddp, backward, ddp.close)

    return Contestant(name, f"{_about(transport, bucket_bytes)}, no_sync() and then sync_gradients()", wrap)


def _wrap(module: nn.Module, transport: Transport, bucket_bytes: int | None) -> DDP:
    return DDP(module, transport) if bucket_bytes is None else DDP.with_bucket_size(module, transport, bucket_bytes)


def _about(transport: Transport, bucket_bytes: int | None) -> str:
    buckets = "" if bucket_bytes is None else f", bucket_size_bytes={bucket_bytes}"
    return f"DDP of murmura {__version__}, {type(transport).__name__}{buckets}"


def torch_ddp(transport: Transport, meeting_file: Path) -> Contestant:
    """torch's DDP on a Gloo group of its own: the default group stays untouched."""
    group = gloo_group(transport, meeting_file, hostname=GLOO_HOST)

    def wrap(module: nn.Module) -> Wrapped:
        return Wrapped(nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True))

    about = (
        f"DistributedDataParallel of torch {torch.__version__}, gradient_as_bucket_view=True, Gloo: TCP on {GLOO_HOST}"
    )
    return Contestant(DDPPeer.TORCH_DDP, about, wrap)


def gloo_group(transport: Transport, meeting_file: Path, **place: str) -> Any:
    """A group of Gloo's for torch's own use, on ``hostname=`` or ``interface=``; every rank calls it."""
    import torch.distributed

    c10d: Any = torch.distributed  # its stubs know nothing of options and of groups that are built by hand
    rank, size = transport.rank, transport.world_size
    store = c10d.FileStore(str(meeting_file), size)
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(**place)]
    options._timeout = timedelta(seconds=transport.timeout)
    gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, size, options)
    group = c10d.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group
