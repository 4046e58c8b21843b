"""Where tensors are: the device of a model, and which GPU of its host that is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from murmura.errors import ConfigError
from murmura.transports.user_group import has_nccl


def parse_device(device: Any) -> torch.device:
    """The device that `device` names; a `ConfigError` if torch knows none of that name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={device!r} is no device: {str(error).splitlines()[0]} Pass 'cpu', 'cuda' or 'cuda:0'."
        ) from None


def device_of(module: Any) -> torch.device | None:
    """The device of the module's first CUDA parameter, else of its first parameter or buffer; None without any."""
    if not isinstance(module, nn.Module):
        return None
    found = [tensor.device for tensor in (*module.parameters(), *module.buffers())]
    return next((device for device in found if device.type == "cuda"), found[0] if found else None)


def gpu_identity(device: torch.device, local_rank: int | None) -> str:
    """What distinguishes the GPU `device` from others of its host in every process; empty if NCCL cannot use it.

    Processes may number GPUs differently (CUDA_VISIBLE_DEVICES), so it is not the number. "cuda" without a number is
    the current device if one was set, else that of the local rank.
    """
    if device.type != "cuda" or not torch.cuda.is_available() or not has_nccl():
        return ""
    properties = torch.cuda.get_device_properties(gpu_number(device, local_rank))
    return str(getattr(properties, "uuid", None) or gpu_number(device, local_rank))


def nccl_gpu(local_rank: int | None) -> int:
    """The number of the GPU on which this rank's NCCL works where no device says it; a `ConfigError` without GPUs."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "transport='nccl' joins ranks on GPUs, and torch finds none here. Is this a build of torch for CUDA, and "
            "does nvidia-smi show a GPU? For CPUs use transport='gloo' or 'shared_memory', or leave it out."
        )
    return gpu_number(torch.device("cuda"), local_rank)


def gpu_number(device: torch.device, local_rank: int | None) -> int:
    """The number of the GPU that `device` means in this process."""
    index: int | None = device.index  # torch's own annotation forgets the None
    if index is not None:
        return index
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    if current == 0 and local_rank is not None and local_rank < torch.cuda.device_count():
        return local_rank
    return current
