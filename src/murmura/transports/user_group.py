"""The process groups that the user of torch.distributed has made, and what can be learnt from one.

A group fixes the ranks, their order, and the store through which they meet. murmura never closes or aborts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from murmura.errors import UsageError
from murmura.transports.rendezvous import Store


@dataclass(frozen=True)
class UserGroup:
    """A process group, and what to call it in a message."""

    group: Any
    words: str

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def world_size(self) -> int:
        return int(self.group.size())

    @property
    def store(self) -> Store:
        """The group's own part of the store on which torch.distributed was initialised; None if it has none."""
        try:
            return self.group.get_group_store()
        except (AttributeError, RuntimeError):  # not a group of torch.distributed's own, or MPI's
            return None

    def backend(self, device: str) -> Any:
        """The backend that the group has for tensors on `device`, None if it has none."""
        if not hasattr(self.group, "_get_backend"):  # it is a backend itself
            return self.group
        try:
            return self.group._get_backend(torch.device(device))
        except RuntimeError:
            return None

    def backend_name(self, device: str) -> str:
        """The name of that backend in lower case; empty if there is none."""
        backend = self.backend(device)
        return "" if backend is None else str(backend.name()).lower()

    def is_for_gpus_alone(self) -> bool:
        """Whether it is one of NCCL, with nothing for tensors in host memory."""
        return self.backend_name("cuda") == "nccl" and self.backend_name("cpu") in ("", "nccl")

    def timeout(self) -> float | None:
        """Seconds that torch.distributed lets an operation of the group last, if it says so."""
        for device in ("cpu", "cuda"):
            options = getattr(self.backend(device), "options", None)
            if options is not None and hasattr(options, "_timeout"):
                return float(options._timeout.total_seconds())
        return None


def has_nccl() -> bool:
    """Whether this torch was built with NCCL."""
    return bool(dist.is_available() and dist.is_nccl_available())


def default_group() -> UserGroup | None:
    """The group that torch.distributed.init_process_group has made; None without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return UserGroup(dist.group.WORLD, "the default process group")


def given_group(process_group: Any) -> UserGroup:
    """The group passed as process_group=; a `UsageError` on a rank that is no member of it."""
    if not all(hasattr(process_group, name) for name in ("rank", "size", "allreduce")):
        raise UsageError(
            f"process_group={process_group!r} is no process group that this rank is a member of. Use it only on the "
            "ranks of the group, as what torch.distributed.new_group() returned there."
        )
    return UserGroup(process_group, "process_group=")


def place_in(process_group: Any) -> tuple[int, int]:
    """This rank in the group, and the number of its ranks; the same `UsageError`."""
    given = given_group(process_group)
    return given.rank, given.world_size
