"""One loss for the whole world."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from murmura.errors import UsageError
from murmura.transports.base import Transport, check_transport


def average_losses(transport: Transport, loss: Tensor | float, num_samples: int) -> float:
    """The mean loss over all samples of all ranks: each rank's mean `loss` counts `num_samples` times.

    Computed in float64, by one all-reduce. A rank without samples takes part and counts nothing, whatever its loss.
    """
    check_transport(transport)
    value = _number(loss)
    count = _count(num_samples)
    device = loss.device if isinstance(loss, Tensor) and loss.is_cuda else torch.device("cpu")
    totals = torch.tensor([value * count if count else 0.0, count], dtype=torch.float64, device=device)
    transport.all_reduce(totals)
    weighted, total = totals.tolist()
    if total == 0:
        raise UsageError("no rank has any samples, so there is no mean loss. Pass num_samples above 0 on some rank.")
    return float(weighted / total)


def _number(loss: Tensor | float) -> float:
    if not isinstance(loss, Tensor):
        try:
            return float(loss)
        except (TypeError, ValueError):
            raise UsageError(f"loss={loss!r} is no number. Pass the mean loss of this rank's samples.") from None
    if loss.numel() != 1 or loss.is_complex():
        raise UsageError(
            f"the loss is a {loss.dtype} tensor of shape {list(loss.shape)}, not one real number. Pass loss.mean()."
        )
    return float(loss.detach().item())


def _count(num_samples: int) -> int:
    try:
        count = operator.index(num_samples)
    except TypeError:
        raise UsageError(f"num_samples={num_samples!r} is not an integer. Pass the number of samples.") from None
    if count < 0:
        raise UsageError(f"num_samples={count} is negative. Pass the number of samples behind this loss, or 0.")
    return count
