"""What users of torch's DistributedDataParallel expect of a wrapper beside its arguments: attributes, state, hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from murmura.ddp.comm_hook import CommHook, Hook, check_hook, torch_group
from murmura.ddp.replica import BROADCAST_BYTES
from murmura.ddp.torch_join import ModelJoinHook
from murmura.errors import UsageError

if TYPE_CHECKING:
    from murmura.ddp.round_driver import RoundDriver
    from murmura.ddp.torch_arguments import TorchArguments


class Reducer:
    """The one method of torch's reducer that is called from outside: Accelerate's `trigger_sync_in_backward` does."""

    def __init__(self, driver: RoundDriver) -> None:
        self._driver = driver

    def prepare_for_backward(self, outputs: Any = ()) -> None:
        """Let the next backward synchronise, wherever its forward ran. `outputs` are not needed."""
        self._driver.backward.forward_syncs = True


class TorchSurface(nn.Module, Joinable):
    """The base of `DDP`: how the wrapper looks to code that was written for torch's class."""

    module: nn.Module
    forward_sync_buffers: bool
    parameters_to_ignore: set[str]
    _driver: RoundDriver
    _torch_group: Any

    def __init__(self) -> None:
        super().__init__()
        Joinable.__init__(self)

    def _show_arguments(self, given: TorchArguments, bucket_bytes: Sequence[int]) -> None:
        """Store the arguments under the public names that torch's class gives them: scripts read these."""
        self._torch_group = given.group
        self.device_ids, self.output_device, self.dim = given.device_ids, given.output_device, given.dim
        self.device_mesh, self.mixed_precision = given.device_mesh, given.mixed_precision
        self.find_unused_parameters, self.static_graph = given.find_unused_parameters, given.static_graph
        self.gradient_as_bucket_view = given.gradient_as_bucket_view
        self.bucket_bytes_cap = bucket_bytes[-1]
        self.bucket_bytes_cap_list = list(bucket_bytes) if given.bucket_cap_mb_list else []
        self.broadcast_bucket_size = BROADCAST_BYTES

    @property
    def device(self) -> torch.device | None:
        """The device of the first parameter."""
        first = next(self.module.parameters(), None)
        return None if first is None else first.device

    @property
    def device_type(self) -> str | None:
        """The type of the first parameter's device."""
        return None if self.device is None else self.device.type

    @property
    def broadcast_buffers(self) -> bool:
        """Whether a round begins with rank 0's buffers, by the older of its two names."""
        return self.forward_sync_buffers

    # The module

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module, where the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not _is_offered(module, name):
                raise
            return getattr(module, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own: no prefix, so it loads with and without DDP."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the module, or one that torch's DDP saved with its prefix."""
        if assign:
            raise UsageError(
                "load_state_dict(assign=True) would replace the parameters that DDP keeps together. "
                "Leave assign out, or load into the module before wrapping it."
            )
        self._driver.reads_names = True
        try:
            own = self.module.state_dict().keys()
        finally:
            self._driver.reads_names = False
        if not any(name in own for name in state_dict) and all(name.startswith("module.") for name in state_dict):
            plain = OrderedDict((name.removeprefix("module."), value) for name, value in state_dict.items())
            if hasattr(state_dict, "_metadata"):  # the versions of the parts, by their names
                parts = state_dict._metadata.items()
                plain._metadata = {name.removeprefix("module").removeprefix("."): each for name, each in parts if name}  # type: ignore[attr-defined]
            state_dict = plain
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Called when an enclosing module loads: its state dict, too, has no prefix for this wrapper."""
        own = f"{prefix}module."
        if not any(name.startswith(own) for name in state_dict):
            for name in [name for name in state_dict if name.startswith(prefix)]:
                state_dict[own + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def process_group(self) -> Any:
        """The group of torch.distributed whose ranks these are, as it was given or by default; None without one."""
        return torch_group(self._torch_group)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Mark parameters and buffers that stay local when `module` is wrapped, as `ignore=` does."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    # Synchronising

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards synchronise from now on; `no_sync` sets it to False. May be set."""
        return not self._driver.backward.in_no_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._driver.backward.in_no_sync = not value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next round begins with rank 0's buffers. May be set; each round sets it to True again."""
        return self._driver.requires_buffers

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._driver.requires_buffers = bool(value)

    @property
    def reducer(self) -> Reducer:
        """The part of torch's reducer that programs call: `reducer.prepare_for_backward([])`."""
        return Reducer(self._driver)

    def _set_static_graph(self) -> None:
        """What scripts call instead of giving static_graph=True. Nothing depends on it."""
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        """What scripts call before they wrap the module anew: close the wrapper."""
        self.close()

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let `hook(state, bucket)` exchange each bucket from now on, as with torch's DistributedDataParallel.

        `bucket` is a `GradBucket`; the hook returns a torch.futures.Future of the tensor that becomes the gradients.
        torch's own hooks run unchanged where torch.distributed has the same ranks. Every rank registers the same hook,
        before the first round.
        """
        driver = self._driver
        if driver.reducer.hook is not None:
            raise UsageError(
                "register_comm_hook() was called a second time, and a DDP has one hook. Wrap the model again: "
                "DDP(ddp.into_inner(), ...)."
            )
        check_hook(hook, driver.algorithm, driver.channel, self._torch_group)
        driver.reducer.use_hook(CommHook(state, hook, driver.channel))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's `Join([ddp, ...])` calls on a rank that is out of data; `ddp.join()` needs no such thing."""
        by_all = kwargs.get("divide_by_initial_world_size", True)
        return ModelJoinHook(self, self._driver.joining.uneven, divide_by_initial=by_all)

    @property
    def join_device(self) -> torch.device:
        """Where `Join` counts the ranks that have data."""
        return next(self.parameters()).device

    @property
    def join_process_group(self) -> Any:
        """Where `Join` counts the ranks that have data."""
        if self.process_group is None:
            raise UsageError("Join([ddp]) counts ranks by torch.distributed, which is not initialised. Use ddp.join().")
        return self.process_group

    # Copies

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            "a DDP cannot be copied: it holds a place in the order of communication. "
            "Copy its model: copy.deepcopy(ddp.module)."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a DDP cannot be pickled: it holds a transport. Save ddp.state_dict() instead.")


def _is_offered(module: nn.Module, name: str) -> bool:
    """Whether `module` has a part or a public attribute of that name; private ones are between it and torch."""
    return any(name in each for each in (module._parameters, module._buffers, module._modules)) or (
        not name.startswith("_") and (hasattr(type(module), name) or hasattr(module, name))
    )
