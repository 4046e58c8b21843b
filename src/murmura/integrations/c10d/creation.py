"""Makes the process groups that torch asks for, with the groups of the other devices in a mixed backend string."""

from __future__ import annotations

import functools
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from murmura.errors import ConfigError, TransportError
from murmura.integrations.c10d.errors import as_torch_error
from murmura.integrations.c10d.groups import open_channel
from murmura.integrations.c10d.identity import GroupOptions
from murmura.integrations.c10d.process_group import MurmuraProcessGroup
from murmura.integrations.c10d.work import seconds_of

DEFAULT_TIMEOUT = timedelta(minutes=30)
TRIED_VERSIONS = ((2, 11), (2, 13))  # of torch, with which its own tests were run on this backend


def create(options: Any, backend_options: Any = None) -> MurmuraProcessGroup:
    """What torch calls for `init_process_group` and `new_group`, on every member, with their `pg_options`."""
    warn_of_untried_version()
    other_devices = _other_devices()
    if not (backend_options is None or isinstance(backend_options, GroupOptions) or "nccl" in other_devices.values()):
        raise ConfigError(
            f"the backend murmura takes no pg_options of type {type(backend_options).__name__}: it has none of its "
            'own, and passes ProcessGroupNCCL.Options on to the group of a string such as "cpu:murmura,cuda:nccl". '
            "Leave them out."
        )
    return make_group(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        ranks=list(options.global_ranks_in_group),
        other_devices=other_devices,
        options=backend_options,
    )


def make_group(
    store: Any,
    rank: int,
    world_size: int,
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    ranks: list[int] | None = None,
    other_devices: dict[str, str] | None = None,
    options: Any = None,
) -> MurmuraProcessGroup:
    """Meet the other ranks at `store`. `other_devices` says which backend serves which other device; `options` are
    for NCCL among them."""
    seconds = seconds_of(timeout) or DEFAULT_TIMEOUT.total_seconds()
    others = _make_others(other_devices or {}, store, rank, world_size, timeout, ranks or [], options)
    try:
        channel = open_channel(store, rank, world_size, seconds, ranks or [])
    except TransportError as error:
        as_torch_error(error)
        raise
    return MurmuraProcessGroup(channel, store, timeout, others=others)


@functools.cache
def warn_of_untried_version() -> None:
    """Warn, once, where torch is of a version that nobody has tried."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version not in TRIED_VERSIONS:
        warnings.warn(
            f"the backend murmura was tried with torch {_tried()}, and this is {torch.__version__}. torch says that "
            "the interface of backends may change; if something fails, use gloo and tell us.",
            stacklevel=6,
        )


def _other_devices() -> dict[str, str]:
    """The backends of a string such as "cpu:murmura,cuda:nccl" that serve other devices.

    torch does not tell a backend of the rest of the string, and forgets the rest when a group written in Python
    appears; so it is read from the function of torch's that is making the group.
    """
    by_device = _requested()
    wrong = [device for device, backend in by_device.items() if str(backend) == "murmura" and device != "cpu"]
    if wrong:
        raise ConfigError(
            f"the backend murmura is for CPU tensors, not for {', '.join(wrong)}. For CUDA tensors use "
            '"cpu:murmura,cuda:nccl", or two groups: new_group(backend="murmura") and new_group(backend="nccl").'
        )
    return {device: str(backend) for device, backend in by_device.items() if device != "cpu"}


def _requested() -> dict[str, str]:
    """The backend of each device that the program asked for: the nearest `BackendConfig` that torch is working on."""
    kind = getattr(dist.distributed_c10d, "BackendConfig", ())
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed"):
            for value in frame.f_locals.values():
                if isinstance(value, kind):
                    return dict(value.get_device_backend_map())
        frame = frame.f_back
    raise ConfigError(
        f"torch {torch.__version__} does not show the backend murmura which string the group was asked for with, so "
        'that the rest of one such as "cpu:murmura,cuda:nccl" would be lost. Use gloo, or a version of torch that was '
        f"tried: {_tried()}."
    )


def _tried() -> str:
    return " and ".join(".".join(map(str, each)) for each in TRIED_VERSIONS)


def _make_others(
    by_device: dict[str, str],
    store: Any,
    rank: int,
    world_size: int,
    timeout: timedelta,
    ranks: list[int],
    given: Any,
) -> Any:
    """A group of torch's own for the tensors of other devices; None if there are none."""
    if not by_device:
        return None
    group = dist.ProcessGroup(store, rank, world_size)
    for device, backend in by_device.items():
        own_store = dist.PrefixStore(f"{device}/", store)  # type: ignore[attr-defined]
        if backend == "nccl":
            if not dist.is_nccl_available():
                raise ConfigError(
                    f'this torch ({torch.__version__}) has no NCCL, which "{device}:nccl" asks for. Install one that '
                    'has, or leave CUDA out: init_process_group("murmura").'
                )
            made: Any = dist.ProcessGroupNCCL(own_store, rank, world_size, nccl_options(given, timeout, ranks))
            kind = dist.ProcessGroup.BackendType.NCCL
        elif backend == "gloo":
            made = dist.ProcessGroupGloo(own_store, rank, world_size, timeout=timeout)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            raise ConfigError(
                f'murmura cannot make the group "{device}:{backend}" beside its own: it knows nccl and gloo. Make two '
                f'groups: init_process_group("{device}:{backend}") and new_group(backend="murmura").'
            )
        made._set_sequence_number_for_group()
        group._register_backend(torch.device(device), kind, made)
        group._set_default_backend(kind)
    return group


def nccl_options(given: Any, timeout: timedelta, ranks: list[int]) -> Any:
    """The options of a group on NCCL: those that the program gave as `pg_options`, if any, for this group."""
    if given is None or isinstance(given, GroupOptions):
        given = dist.ProcessGroupNCCL.Options()
    elif not isinstance(given, dist.ProcessGroupNCCL.Options):
        raise ConfigError(f"pg_options of type {type(given).__name__} are not for NCCL: use ProcessGroupNCCL.Options.")
    given._timeout = timeout
    given.global_ranks_in_group = ranks
    return given
