"""What the strategies of the Trainer and of Fabric have in common."""

from __future__ import annotations

import inspect
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from murmura.algorithms.names import as_algorithm
from murmura.ddp import DDP
from murmura.ddp.options import check_options
from murmura.errors import CheckpointError, ConfigError
from murmura.integrations.replica_state import load_algorithm
from murmura.transports.shared_memory import futex

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy as Strategy
else:
    Strategy = object  # the strategies of the Trainer and of Fabric have no base in common that has these collectives

log = logging.getLogger("murmura")

REFUSED = {
    "model_averaging_period": "algorithm=LocalSGDAlgorithm(period) averages weights every so many steps.",
    "transport": "the ranks are those of Lightning's process group. MURMURA_TRANSPORT chooses the kind of transport.",
    "process_group": "the ranks are those of Lightning's default process group.",
    "device_mesh": "the ranks are those of Lightning's default process group.",
}


class AnnouncedCollectives(Strategy):
    """Before each collective of Lightning's, does the exchanges that other ranks may be waiting for."""

    @abstractmethod
    def ddps(self) -> list[DDP]:
        """The wrappers of the modules."""

    def announce(self) -> None:
        """Do the exchanges left undone because this rank skipped its step: other ranks may be waiting in them."""
        for ddp in self.ddps():
            if not ddp.transport.closed and not ddp.transport.failed:
                ddp.transport.announce()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        self.announce()
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank `src` passes."""
        self.announce()
        return super().broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked."""
        self.announce()
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered


def check_arguments(strategy: str, base: type, algorithm: Any, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that no rank could use, before processes start; `base` is Lightning's class."""
    for name in options:
        if name in REFUSED:
            raise ConfigError(f"{strategy} takes no {name}=: {REFUSED[name]}")
    lightnings = [name for name, each in inspect.signature(base).parameters.items() if each.kind != each.VAR_KEYWORD]
    chosen = check_options(**{name: value for name, value in options.items() if name not in lightnings})
    if algorithm is not None:
        chosen.torch_arguments.check_start(as_algorithm(algorithm))
    timeout = options.get("timeout")
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise ConfigError(f"timeout={timeout!r} is no time above 0. Pass a timedelta, such as timedelta(minutes=30).")


def default_backend(device: torch.device) -> str:
    """The backend of Lightning's own process group: its default on a GPU, on the CPU murmura's where that can run."""
    if device.type == "cuda":
        return "nccl"
    return "murmura" if futex.is_supported() and hasattr(dist.Backend, "MURMURA") else "gloo"


def reduced(reduce: Callable[..., Any], tensor: Any, group: Any, reduce_op: Any) -> Any:
    """What Lightning's `reduce` returns; a mean of integers is rounded towards zero, as on Gloo."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    if not (isinstance(tensor, Tensor) and is_mean and dist.is_initialized()) or tensor.is_floating_point():
        return reduce(tensor, group, reduce_op)
    total = reduce(tensor, group, "sum")
    return total.copy_(total / dist.get_world_size(group))


def gather(value: Any) -> list[Any]:
    """The values of all ranks of Lightning's process group, by rank. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def write_means(state: dict[str, Any], device: torch.device) -> None:
    """Replace each floating-point or complex tensor in `state` by its mean over the ranks. Collective.

    The tensors themselves are not written. Those of fewer than 32 bits are summed in 32.
    """
    wide = {
        name: value.detach().to(device, torch.promote_types(value.dtype, torch.float32), copy=True)
        for name, value in state.items()
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    }
    for dtype in sorted({value.dtype for value in wide.values()}, key=str):
        names = [name for name, value in wide.items() if value.dtype is dtype]
        flat = torch.cat([wide[name].reshape(-1) for name in names])
        dist.all_reduce(torch.view_as_real(flat) if flat.is_complex() else flat)
        flat /= dist.get_world_size()
        parts = torch.split(flat, [wide[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            old = state[name]
            state[name] = part.reshape(old.shape).to(old.device, old.dtype, copy=True)


def algorithm_state(ddp: DDP) -> dict[str, Any]:
    """The algorithm's state on this rank, also while gradients are being accumulated. Collective."""
    if not ddp.is_accumulating:
        return ddp.algorithm_state_dict()
    log.warning(
        "rank %d: gradients are being accumulated, and Lightning's checkpoints hold none: a run that is resumed from "
        "this one lacks those of this step. Save after a step to go on where it stopped.",
        ddp.transport.rank,
    )
    return ddp.unsettled_algorithm_state_dict()


def load_algorithm_beside(
    path: Any, ddp: DDP, state: Mapping[str, Any], optimizers: Sequence[Any], *, same_size: bool
) -> None:
    """Let the algorithm go on with its `state`, which stands beside the checkpoint `path`; see `load_algorithm`."""
    try:
        load_algorithm(ddp, state, optimizers, same_size=same_size)
    except ConfigError as error:
        raise CheckpointError(
            f"loading {path} on rank {ddp.transport.rank}: {error} It stands in replicas/ beside the file: without "
            "that folder all ranks begin with the plain file, whatever the algorithm."
        ) from error


@torch.no_grad()
def unshare(module: nn.Module, start_method: str) -> None:
    """Give the module memory of its own on each rank, where the processes were handed one memory for all.

    Lightning does it for "spawn", and leaves it out for "forkserver".
    """
    if start_method == "forkserver":
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_cuda:
                tensor.data = tensor.data.clone()
