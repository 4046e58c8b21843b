"""The arguments of torch's DistributedDataParallel: taken, accepted because the promise is kept anyway, or refused.

One changed name must be enough to move a script from torch's class to `DDP`. `docs/migration.md` has the table.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from murmura.algorithms import Algorithm
from murmura.algorithms.checks import yes_or_no
from murmura.errors import ConfigError, UsageError
from murmura.types import Exchanges

log = logging.getLogger("murmura")

DEFAULT_BUCKET_BYTES = 25 * 2**20

# Nobody needs these here: there is no reduction to check or to skip, and copies are made one by one.
_NEEDLESS = {"check_reduction", "skip_all_reduce_unused_params", "batched_grad_copy"}
_REFUSED = {
    "delay_all_reduce_named_params": "hands parameters over to a hook of yours. Name them in ignore=[...], and "
    "exchange their gradients yourself with ddp.transport.all_reduce.",
    "param_to_hook_all_reduce": "belongs to delay_all_reduce_named_params, which is refused. Name parameters in "
    "ignore=[...], and exchange their gradients yourself with ddp.transport.all_reduce.",
}


@dataclass(frozen=True)
class TorchArguments:
    """The arguments of a DDP that torch's class has too; `others` are those that neither documents."""

    process_group: Any = None
    device_ids: Any = None
    output_device: Any = None
    dim: int = 0
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: Sequence[float] | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    mixed_precision: Any = None
    device_mesh: Any = None
    init_sync: bool = True
    forward_sync_buffers: bool | None = None
    others: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise an error for what no module can be wrapped with."""
        for name in ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "init_sync"):
            yes_or_no(**{name: getattr(self, name)})
        if self.forward_sync_buffers is not None:
            yes_or_no(forward_sync_buffers=self.forward_sync_buffers)
        if self.dim != 0:
            raise ConfigError(f"dim={self.dim!r}: a process has one device, so no input is scattered. Leave dim out.")
        if self.mixed_precision is not None:
            raise ConfigError(
                "mixed_precision= is refused: it keeps a second copy of the parameters in another dtype, which DDP "
                "cannot keep equal between the ranks, and torch's own fails on the CPU. Compute under "
                "torch.autocast(...), and exchange in fewer bits with "
                "algorithm=GradientAllReduceAlgorithm(compressor=Cast(torch.bfloat16))."
            )
        for name, value in self.others.items():
            if name not in _NEEDLESS | _REFUSED.keys():
                raise TypeError(f"DDP() got an unexpected keyword argument {name!r}")
            if name in _REFUSED and value is not None:
                raise ConfigError(f"{name}= is refused: it {_REFUSED[name]}")
        self._check_mesh()
        if self.device_ids is not None and not isinstance(self.device_ids, (list, tuple)):
            raise ConfigError(f"device_ids={self.device_ids!r} must be a list, such as [local_rank], or None.")
        if len(self.device_ids or ()) > 1:
            raise ConfigError(
                f"device_ids={self.device_ids!r} names several devices, and a process has one. Start a process for "
                "each GPU, and give each [local_rank]."
            )

    def _check_mesh(self) -> None:
        if self.device_mesh is None:
            return
        if self.process_group is not None:
            raise UsageError("Cannot specify both process_group and device_mesh arguments. Leave one of them out.")
        if not hasattr(self.device_mesh, "ndim"):
            raise ConfigError(f"device_mesh={self.device_mesh!r} is no DeviceMesh. Make one with init_device_mesh().")
        if self.device_mesh.ndim != 1:
            raise UsageError(
                f"Only 1D device mesh is supported, but this one has {self.device_mesh.ndim} dimensions. Give the one "
                "along which replicas are kept together: device_mesh['its name']."
            )

    def check_for(self, module: nn.Module) -> None:
        """Raise `ConfigError` for what does not suit `module`, before anything is sent."""
        sharded = [name for name, each in module.named_parameters() if hasattr(each, "device_mesh")]
        if self.device_mesh is not None and sharded:
            raise ConfigError(
                f"parameter {sharded[0]!r} is a DTensor, sharded over ranks, and DDP keeps whole replicas together. "
                "Use torch's fully_shard or DistributedDataParallel for this model."
            )
        devices = {each.device for each in module.parameters()}
        wanted = [_index(each) for each in (*(self.device_ids or ()), self.output_device) if each is not None]
        if not wanted:
            return
        if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
            if any(index != device.index for index in wanted):
                raise ConfigError(
                    f"device_ids={self.device_ids!r}, output_device={self.output_device!r}, but the model is on "
                    f"{device}. Move it first: DDP(model.to(local_rank), device_ids=[local_rank])."
                )
        elif {device.type for device in devices} == {"cpu"}:
            log.warning("device_ids=%r is not used: the model is on the CPU, and stays there", self.device_ids)

    def check_start(self, algorithm: Algorithm) -> None:
        """Refuse `init_sync=False` where an algorithm relies on equal weights: nobody would notice if they differ."""
        if not self.init_sync and (algorithm.impl is None or algorithm.impl.exchanges is not Exchanges.GRADIENTS):
            raise ConfigError(
                f"init_sync=False: {type(algorithm).__name__} starts from equal weights on all ranks. Leave init_sync "
                "out."
            )

    @property
    def group(self) -> Any:
        """The process group that was named, or None."""
        return self.process_group if self.device_mesh is None else self.device_mesh.get_group(0)

    def input_device(self, module: nn.Module) -> torch.device | None:
        """The GPU to which torch's class would move inputs, or None: then they stay where they are."""
        first = next(module.parameters(), None)
        return first.device if self.device_ids and first is not None and first.is_cuda else None

    def bucket_bytes(self, bucket_size_bytes: int) -> list[int]:
        """The sizes of the first buckets and, last, of all others, from torch's arguments or from ours."""
        caps = [] if self.bucket_cap_mb is None else [self.bucket_cap_mb]
        if self.bucket_cap_mb_list is not None:
            if not isinstance(self.bucket_cap_mb_list, (list, tuple)):
                raise ConfigError(f"bucket_cap_mb_list={self.bucket_cap_mb_list!r} must be a list of numbers above 0.")
            caps += self.bucket_cap_mb_list
        if not caps:
            return [bucket_size_bytes]
        if bucket_size_bytes != DEFAULT_BUCKET_BYTES or (self.bucket_cap_mb is not None and self.bucket_cap_mb_list):
            raise ConfigError(
                "bucket_size_bytes=, bucket_cap_mb= and bucket_cap_mb_list= all say how large a bucket is. Give one."
            )
        for cap in caps:
            if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < float("inf"):
                where = "bucket_cap_mb_list" if self.bucket_cap_mb_list else "bucket_cap_mb"
                raise ConfigError(f"{where}: {cap!r} must be a number above 0.")
        return [max(1, int(cap * 2**20)) for cap in caps]


def split_positional(transport: Any, device_ids: Any) -> tuple[Any, Any]:
    """The transport and the device ids: the second argument of torch's class, `DDP(model, [rank])`, is the latter."""
    if isinstance(transport, (list, tuple)):
        if device_ids is not None:
            raise ConfigError(f"device_ids are given twice: {transport!r} and {device_ids!r}. Give them once.")
        return None, transport
    if isinstance(transport, int):
        raise ConfigError(f"DDP(model, {transport!r}): device ids are a list, such as [{transport!r}].")
    return transport, device_ids


def moved(inputs: Any, device: torch.device) -> Any:
    """`inputs` with every tensor in it on `device`, as torch's class moves them to its `device_ids`."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(moved(each, device) for each in inputs))
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(moved(each, device) for each in inputs)
    if isinstance(inputs, dict):
        return type(inputs)((key, moved(value, device)) for key, value in inputs.items())
    return inputs


def _index(device: Any) -> int | None:
    try:
        return device if isinstance(device, int) else torch.device(device).index
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"{device!r} in device_ids or output_device is no device. Give a number, such as local_rank, or 'cuda:0'."
        ) from None


def ignored_names(module: nn.Module, ignore: Collection[str]) -> set[str]:
    """What stays local: `ignore`, and the names that torch's way of ignoring parameters has left on the module."""
    marked = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {*ignore, *(own & set(marked))}
