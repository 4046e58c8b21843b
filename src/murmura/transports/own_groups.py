"""Process groups of murmura's own, beside torch's default one: Gloo's, and NCCL's, which never end the process.

By default torch ends the whole process when an NCCL peer is gone or a time is up. Here the transport's watchdog breaks
the group off and the next call raises, so torch is told to leave failures alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from murmura.errors import UsageError

# Read by torch when a group is made: it neither ends the process nor waits for a debug dump, during which it would hold
# up every launch, nor lets the host wait for each operation.
_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
_setting = threading.Lock()
ABORT_SECONDS = 10.0  # for a group on a GPU to break off what it does; kernels of others may hold it up


def group_maker(store: Any, rank: int, world_size: int, kind: str, timeout: float, num_hosts: int) -> Callable[[], Any]:
    """What makes the group, in whichever thread it is called."""
    if kind == "gloo":
        return functools.partial(_make_gloo_group, store, rank, world_size, timedelta(seconds=timeout), num_hosts)
    if kind == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())  # of this thread
        return functools.partial(_make_nccl_group, store, rank, world_size, timeout, device)
    raise UsageError(
        f"murmura builds gloo and nccl groups, not {kind!r}. Build it yourself and hand it over: "
        "ProcessGroupTransport(group, store=store)."
    )


def _make_gloo_group(store: Any, rank: int, world_size: int, limit: timedelta, num_hosts: int) -> Any:
    if num_hosts > 1:
        return dist.ProcessGroupGloo(store, rank, world_size, limit)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, world_size, options)


def _make_nccl_group(store: Any, rank: int, world_size: int, timeout: float, device: torch.device) -> Any:
    """A group whose ranks have connected, so that no launch has to wait for that."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    # Counted from the launch, though kernels that were queued before may take long: it lies well beyond our deadline.
    options._timeout = timedelta(seconds=2 * timeout + 600)
    with torch.cuda.device(device):
        with _variables_set():
            group = nccl(store, rank, world_size, options)
        group.eager_connect_single_device(device)
    return group


def abort(group: Any, device: torch.device) -> None:
    """Break off what a group on the GPU `device` does; its other channels can be aborted even if this fails."""
    with contextlib.suppress(RuntimeError):  # the GPU has failed
        end_within(ABORT_SECONDS, device, group.abort)


def end_within(seconds: float, device: torch.device, act: Callable[[], None]) -> bool:
    """Let `act`, which ends a group on the GPU `device`, take `seconds` at most; whether it has ended.

    It would wait for kernels that do not end, or for peers that never end theirs. It may go on in its thread.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            torch.cuda.set_device(device)
            act()
        except BaseException as error:  # raised in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name="murmura-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and starts no thread any more
        act()
        return True
    thread.join(seconds)
    if errors:
        raise errors[0]
    return not thread.is_alive()


@contextlib.contextmanager
def _variables_set() -> Iterator[None]:
    with _setting:
        before = {name: os.environ.get(name) for name in _VARIABLES}
        os.environ.update(_VARIABLES)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
