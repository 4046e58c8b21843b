"""`MurmuraFabricStrategy`: Fabric with `murmura.DDP` in place of torch's wrapper."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

from murmura.algorithms import Algorithm
from murmura.ddp import DDP
from murmura.errors import CheckpointError, UsageError
from murmura.integrations.lightning import own_files
from murmura.integrations.lightning.common import (
    AnnouncedCollectives,
    check_arguments,
    default_backend,
    load_algorithm_beside,
    reduced,
    unshare,
)
from murmura.integrations.replica_state import mean_state_dict, optimizers_of, replicas_differ


class MurmuraFabricStrategy(AnnouncedCollectives, DDPStrategy):
    """Keeps the replicas of every module that `fabric.setup` gets together by `algorithm`.

    Args:
        algorithm: an Algorithm or its name; None takes MURMURA_ALGORITHM, else gradient all-reduce.
        process_group_backend: of Fabric's own barriers, metrics and broadcasts; None takes "murmura" on the CPU,
            "nccl" on CUDA. The replicas travel as `murmura.DDP` chooses.
        options: those of Fabric's DDPStrategy (`timeout`, `start_method`, …); all others go to `murmura.DDP`.
    """

    def __init__(
        self, algorithm: Algorithm | str | None = None, *, process_group_backend: str | None = None, **options: Any
    ) -> None:
        check_arguments("MurmuraFabricStrategy", DDPStrategy, algorithm, options)
        super().__init__(process_group_backend=process_group_backend, **options)
        self._backward_sync_control = _NoSync()
        self._algorithm = algorithm
        self._ddps: list[DDP] = []

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or default_backend(self.root_device)

    def setup_module(self, module: nn.Module) -> DDP:
        """`module` in a `murmura.DDP`."""
        unshare(module, self._start_method)
        ddp = DDP(module, algorithm=self._algorithm, **self._ddp_kwargs)
        self._ddps.append(ddp)
        return ddp

    def teardown(self) -> None:
        """End the communication of all replicas."""
        for ddp in self._ddps:
            ddp.close()
        self._ddps.clear()
        super().teardown()

    # Collectives of Fabric's

    def ddps(self) -> list[DDP]:
        """The wrappers of all modules."""
        return self._ddps

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, or another reduction, over the ranks, in place."""
        self.announce()
        return reduced(super().all_reduce, tensor, group, reduce_op)

    # Checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The state of the bare module, of this rank."""
        state: dict[str, Any] = super().get_module_state_dict(module.module if isinstance(module, DDP) else module)
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load the state of a bare module."""
        super().load_module_state_dict(module.module if isinstance(module, DDP) else module, state_dict, strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save the mean of the replicas under the keys of `state`, and each rank's own state beside it. Collective."""
        ddps = _ddps_in(state)
        if not ddps:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        self.announce()
        algorithms = {name: ddp.algorithm_state_dict() for name, ddp in ddps.items()}
        different = [name for name, ddp in ddps.items() if replicas_differ(ddp)]
        own = self._convert_stateful_objects_in_state(state, filter=filter or {})
        plain = dict(own)
        for name in different:
            means = mean_state_dict(ddps[name])
            plain[name] = {key: means[key] for key in own[name]}
        if not different:
            own = {name: _buffers(ddp, own.get(name, {})) for name, ddp in ddps.items()}
        own = {"algorithms": algorithms, "state": own}
        own_files.save(self.checkpoint_io, path, plain, own, differ=bool(different), options=storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint into the objects of `state`: each rank its own state if modules of it are set up.

        Without `state` the plain checkpoint is returned, with the mean of the replicas. Collective.
        """
        path = self.broadcast(os.fspath(path))
        ddps = _ddps_in(state)
        if not ddps:
            return _without_note(super().load_checkpoint(path, state, strict, weights_only))
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        own = own_files.load(self.checkpoint_io, path, checkpoint, weights_only=weights_only)
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        if own is not None:
            self._load_own(path, state, ddps, own)
        return _without_note(rest)

    def _load_own(self, path: str, state: dict[str, Any], ddps: Mapping[str, DDP], own: dict[str, Any]) -> None:
        for name, saved in own["state"].items():
            target = state.get(name)
            if isinstance(target, DDP):
                target.load_state_dict({**target.state_dict(), **saved})
            elif target is not None and hasattr(target, "load_state_dict"):
                target.load_state_dict(saved)
            elif name in state:
                state[name] = saved
        for name, ddp in ddps.items():
            if name not in own["algorithms"]:
                raise CheckpointError(
                    f"{path} has no state of an algorithm for {name!r}. Load under the names of the save."
                )
            optimizers = optimizers_of(ddp, [each for each in state.values() if isinstance(each, Optimizer)])
            load_algorithm_beside(path, ddp, own["algorithms"][name], optimizers, same_size=own["same_size"])


class _NoSync(_BackwardSyncControl):
    """What `fabric.no_backward_sync` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return contextlib.nullcontext()
        return ddp_of(module).no_sync()


def ddp_of(module: nn.Module) -> DDP:
    """The `murmura.DDP` inside of what `fabric.setup` returned: for `average_parameters()`, `consensus_distance()`…"""
    for each in (module, getattr(module, "_orig_mod", None), getattr(module, "_forward_module", None)):
        if isinstance(each, DDP):
            return each
    inner = getattr(getattr(module, "_forward_module", None), "_orig_mod", None)
    if isinstance(inner, DDP):
        return inner
    raise UsageError(
        f"a {type(module).__name__} is not what fabric.setup() returned with a MurmuraFabricStrategy. Pass that."
    )


def _ddps_in(state: Any) -> dict[str, DDP]:
    return {name: each for name, each in state.items() if isinstance(each, DDP)} if isinstance(state, dict) else {}


def _buffers(ddp: DDP, state: Mapping[str, Any]) -> dict[str, Any]:
    names = {name for name, _ in ddp.module.named_buffers()}
    return {name: value for name, value in state.items() if name in names}


def _without_note(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.items() if name != own_files.KEY}
