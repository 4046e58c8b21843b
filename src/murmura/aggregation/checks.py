"""Checks of an aggregator's arguments, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from murmura.collectives.reduction import check_reducible
from murmura.config import DistributedConfig, raise_faults
from murmura.errors import ConfigError, UsageError
from murmura.transports.base import Transport, check_transport
from murmura.transports.checks import check_dense
from murmura.types import ReduceOp


def check_place(config: DistributedConfig, transport: Transport) -> None:
    """Raise `ConfigError` if config and transport differ in rank or world size; all contradictions at once."""
    if not isinstance(config, DistributedConfig):
        raise ConfigError(f"config={config!r} is no DistributedConfig. Give one, such as DistributedConfig.from_env().")
    check_transport(transport)
    places = {"world_size": (config.world_size, transport.world_size), "rank": (config.rank, transport.rank)}
    faults = [
        f"{name}={told} contradicts the transport, whose {name} is {found}. "
        "Hand over the transport that was made for this config, or a config with the transport's own numbers."
        for name, (told, found) in places.items()
        if told != found
    ]
    raise_faults(faults, "the aggregator's config")


def check_list(tensors: Iterable[object], what: str) -> list[Tensor]:
    """Return `tensors` as a list, once every entry is known to be a tensor; `what` is the argument's name."""
    if isinstance(tensors, Tensor):
        raise UsageError(f"{what} is a single tensor. Pass a list of tensors: [tensor].")
    listed: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"{what}[{index}] is {'None' if tensor is None else f'of type {type(tensor).__name__}'}, not a tensor. "
                "For a parameter that was not used here pass torch.zeros_like(parameter)."
            )
        listed.append(tensor)
    return listed


def check_sendable(tensors: Iterable[object], what: str, *, mean: bool) -> list[Tensor]:
    """The same, once every tensor is known to be of a kind that can be exchanged and, if `mean`, averaged."""
    listed = check_list(tensors, what)
    for index, tensor in enumerate(listed):
        try:
            check_dense(tensor)
            if mean:
                check_reducible(ReduceOp.MEAN, tensor.dtype)
        except UsageError as refusal:
            raise UsageError(f"{what}[{index}]: {refusal}") from None
    return listed
