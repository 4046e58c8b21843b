"""Accelerate on murmura: an `Accelerator` that keeps the replicas together by any of murmura's algorithms.

Everything else is Accelerate's own: placement, mixed precision, accumulation, clipping, data loaders, trackers. Its
default process group carries barriers and metrics; the replicas are kept together on the transport that `DDP` takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

try:
    import accelerate
    from accelerate.utils import DistributedType, InitProcessGroupKwargs, parse_flag_from_env
except ImportError as error:
    raise ImportError(
        f"murmura.integrations.accelerate needs Accelerate: pip install 'murmura[accelerate]' ({error})"
    ) from error

from murmura.algorithms import Algorithm
from murmura.algorithms.names import as_algorithm
from murmura.checkpoint.stateful import Stateful
from murmura.config import DistributedConfig
from murmura.ddp import DDP
from murmura.environment import set_torchrun_variables
from murmura.errors import ConfigError, UsageError
from murmura.integrations.replica_state import (
    averaged,
    copied,
    optimizers_of,
    restore_own_state,
    saving_own_state,
)

__all__ = ["Accelerator"]

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_SHARDED = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """An `accelerate.Accelerator` whose `prepare` wraps models in `murmura.DDP`.

    Where replicas differ, `save_state`, `save_model` and `get_state_dict` give their mean under the plain keys, so
    every rank must call them; `save_state` keeps each rank's own state beside it, and `load_state` goes on from that.

    Args:
        algorithm: an Algorithm or its name; None takes the environment's, else gradient all-reduce.
        options: those of `accelerate.Accelerator`. What `DistributedDataParallelKwargs` among its `kwargs_handlers`
            holds goes to `murmura.DDP`, which takes torch's arguments.
    """

    def __init__(self, *args: Any, algorithm: Algorithm | str | None = None, **options: Any) -> None:
        for name in _SHARDED:
            if options.get(name) is not None:
                raise ConfigError(
                    f"{name}= shards the model, and murmura keeps whole replicas together. Use accelerate.Accelerator "
                    "for it, without algorithm=; it can run on murmura's process group."
                )
        chosen = None if algorithm is None else as_algorithm(algorithm)
        _start_group(options)
        super().__init__(*args, **options)
        self._begin(chosen)

    @classmethod
    def adopt(cls, accelerator: Any, algorithm: Algorithm | str | None) -> Accelerator:
        """Make a murmura Accelerator of one of Accelerate's own, in place, before it has prepared anything."""
        chosen = None if algorithm is None else as_algorithm(algorithm)
        accelerator.__class__ = cls
        found: Accelerator = accelerator
        found._begin(chosen)
        return found

    def _begin(self, algorithm: Algorithm | None) -> None:
        self._algorithm = algorithm
        self._ddps: list[DDP] = []
        self._saving = contextlib.ExitStack()
        self._folder = ""
        if self.distributed_type not in _KINDS:
            raise ConfigError(
                f"Accelerate is configured for {self.distributed_type}, and murmura keeps whole replicas together, on "
                "CPUs and GPUs. Use accelerate.Accelerator for it, without algorithm=."
            )
        self._refuse_lonely_ranks()
        self.register_save_state_pre_hook(self._before_saving)
        self.register_load_state_pre_hook(self._before_loading)

    # Preparing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """`model` in mixed precision, on its device, wrapped in `murmura.DDP` if it is to be trained. Collective."""
        if any(model is ddp for ddp in self._ddps):
            return model
        if isinstance(model, DDP):
            raise UsageError("prepare() wraps models itself, and this one is wrapped already. Give it the bare model.")
        is_prepared = getattr(model, "_is_accelerate_prepared", False)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        if evaluation_mode or is_prepared or not is_trained or not self.use_distributed:
            return prepared
        options = {} if self.ddp_handler is None else self.ddp_handler.to_kwargs()
        ddp = DDP(prepared, algorithm=self._algorithm, **options)
        if self.ddp_handler is not None:
            self.ddp_handler.register_comm_hook(ddp)
        prepared._is_accelerate_prepared = False  # type: ignore[assignment]  # so that it can be wrapped anew
        self._ddps.append(ddp)
        return ddp

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """The bare model; see `accelerate.Accelerator.unwrap_model`."""
        bare = model.module if isinstance(model, DDP) else model
        unwrapped: nn.Module = super().unwrap_model(bare, *args, **options)
        return unwrapped

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Let the next backward synchronise, though its forward ran inside `no_sync`."""
        if not isinstance(model, DDP):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    # Accelerate's own collectives: what a step, skipped on one rank, left undone is done before them

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's. Collective."""
        self.announce()
        return super().gather(tensor)

    def reduce(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """As Accelerate's. Collective."""
        self.announce()
        return super().reduce(tensor, *args, **options)

    def pad_across_processes(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """As Accelerate's. Collective."""
        self.announce()
        return super().pad_across_processes(tensor, *args, **options)

    def wait_for_everyone(self) -> None:
        """As Accelerate's. Collective."""
        self.announce()
        super().wait_for_everyone()

    def announce(self) -> None:
        """Tell the models that this rank is about to wait for all others."""
        for ddp in self._ddps:
            ddp.transport.announce()

    def average_parameters(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside it `model` holds the mean of its replicas; with one process nothing changes. Collective.

        Evaluate in it; afterwards each replica has its own weights back.
        """
        ddp = self.ddp_of(model)
        return contextlib.nullcontext() if ddp is None else averaged(ddp)

    # Checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """A state dict of the bare model; the mean of the replicas if these may differ, and then collective."""
        ddp = self.ddp_of(model) if unwrap else None
        if ddp is None:
            return super().get_state_dict(model, unwrap)
        with averaged(ddp):
            return copied(super().get_state_dict(model, unwrap))

    def save_state(self, *args: Any, **options: Any) -> Any:
        """As Accelerate's, with the mean of the replicas and every rank's own state. Collective.

        It returns when all ranks have written their files.
        """
        with contextlib.ExitStack() as self._saving:
            location = super().save_state(*args, **options)
        self.wait_for_everyone()
        return location

    def load_state(self, *args: Any, **options: Any) -> None:
        """As Accelerate's; each rank goes on from its own state if there is one. Collective."""
        super().load_state(*args, **options)
        for index, ddp in enumerate(self._ddps):
            parts = optimizers_of(ddp, self._optimizers), self._others(index)
            restore_own_state(self._folder, ddp, *parts, name=_name(index))

    def _before_saving(self, models: Any, weights: Any, folder: str) -> None:
        """Accelerate calls it when it has made the folder; `weights` share the memory of the models."""
        for index, ddp in enumerate(self._ddps):
            parts = optimizers_of(ddp, self._optimizers), self._others(index)
            self._saving.enter_context(saving_own_state(folder, ddp, *parts, name=_name(index)))
        for ddp in self._ddps:
            self._saving.enter_context(averaged(ddp))

    def _others(self, index: int) -> list[Stateful]:
        """Schedulers and scaler, which differ between ranks that skip steps alone; saved with the first model."""
        if index:
            return []
        return [*self._schedulers, *([] if self.scaler is None else [self.scaler])]

    def _before_loading(self, models: Any, folder: str) -> None:
        self._folder = folder

    # Life

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's; closes the wrappers. Collective."""
        self.close_models()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """As Accelerate's; closes the wrappers before the process group goes. Collective."""
        self.close_models()
        super().end_training()

    def close_models(self) -> None:
        """Close the wrappers of all models, which stay trainable without them. Collective."""
        for ddp in self._ddps:
            ddp.close()
        self._ddps = []

    def ddp_of(self, model: nn.Module) -> DDP | None:
        """The wrapper of `model`, which may be the wrapper itself; None if there is none."""
        _check_module(model)
        bare = self.unwrap_model(model, keep_torch_compile=False)
        return next((ddp for ddp in self._ddps if self.unwrap_model(ddp, keep_torch_compile=False) is bare), None)

    def _refuse_lonely_ranks(self) -> None:
        if self.num_processes > 1:
            return
        try:
            world_size = dist.get_world_size() if dist.is_initialized() else DistributedConfig.from_env().world_size
        except ConfigError as error:
            raise ConfigError(
                f"{error}\nIf `accelerate launch` started this: without --multi_gpu it starts one process, whatever "
                "--num_processes says. On CPUs write `accelerate launch --multi_gpu --num_processes N`, without --cpu, "
                "and Accelerator(cpu=True)."
            ) from error
        if world_size > 1:
            raise ConfigError(
                f"the launcher started {world_size} ranks, and Accelerate sees one: without a GPU it sees several only "
                "with Accelerator(cpu=True), TrainingArguments(use_cpu=True) or ACCELERATE_USE_CPU=true in the "
                "environment."
            )


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r} is no torch.nn.Module. Pass the model that prepare() returned.")


def _name(index: int) -> str:
    return "murmura" if index == 0 else f"murmura_{index}"


def _start_group(options: dict[str, Any]) -> None:
    """Make murmura's backend the default process group of CPU ranks; Accelerate uses a group that exists."""
    is_told = set_torchrun_variables()  # Accelerate does not read SLURM's variables
    is_cpu = options.get("cpu") or parse_flag_from_env("ACCELERATE_USE_CPU")
    if not is_cpu or dist.is_initialized() or not (is_told or dist.is_torchelastic_launched()):
        return
    handlers = [each for each in options.get("kwargs_handlers") or () if isinstance(each, InitProcessGroupKwargs)]
    wished = handlers[0].to_kwargs() if handlers else {}
    if wished.pop("backend", None) is None:
        dist.init_process_group("murmura", **wished)
