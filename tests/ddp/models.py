"""Small models, data and helpers of the DDP suites.

Nothing here draws from torch's global random numbers: ranks that are threads share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from murmura import AsyncModelAverageAlgorithm, DiLoCoAlgorithm, LocalSGDAlgorithm, Transport, run_world
from worlds import SECONDS

Module = TypeVar("Module", bound=nn.Module)

# The first optimizer of a process loads torch's compiler, which sets an environment variable: before any test.
torch.optim.SGD([nn.Parameter(torch.zeros(1))])


WEIGHT_ALGORITHMS: dict[str, Any] = {
    "decentralized": "decentralized",
    "shift_one": "shift_one",
    "local_sgd": LocalSGDAlgorithm(1),
    "diloco": DiLoCoAlgorithm(1),
    "low_precision": "low_precision_decentralized",
    "async": AsyncModelAverageAlgorithm(sync_interval_rounds=1),
    "push_sum": "push_sum",
    "sparse_loco": "sparse_loco:interval=1",
    "streaming_diloco": "streaming_diloco:interval=1:fragments=1:overlap=1",
}
"""What averages weights in every round."""


def fill(module: Module, seed: int = 0) -> Module:
    """The module, its parameters filled from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that depend on `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A model of one number: its gradient is the input, so that every mean can be done in one's head."""
    linear = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(linear.weight, value)
    return linear


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1, 1), float(value), dtype=dtype)


def backward(model: nn.Module, value: float) -> None:
    """A backward that leaves `value` in the gradient of `weight()`."""
    model(number(value)).sum().backward()


class Heads(nn.Module):
    """A trunk and some heads; a forward uses the heads it is told to."""

    def __init__(self, num_heads: int = 3, width: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Linear(width, width) for _ in range(num_heads))

    def forward(self, x: Tensor, use: Iterable[int] = ()) -> Tensor:
        out = self.trunk(x)
        for index in use:
            out = out + self.heads[index](x)
        return out


class Scale(nn.Module):
    """One parameter of any dtype and shape; the gradient is the input's conjugate."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def on_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, hosts: list[int] | None = None) -> list[Any]:
    """`fn(transport, *args)` on every rank of a world of threads."""
    return run_world(fn, num_ranks, *args, hosts=hosts, timeout=SECONDS)


def errors_on(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Exception]:
    """What `fn` raised on each rank; it must raise on all of them."""

    def attempt(transport: Transport) -> Exception:
        try:
            result = fn(transport, *args)
        except Exception as error:
            return error
        raise AssertionError(f"rank {transport.rank} returned {result!r} instead of raising")

    return on_ranks(attempt, num_ranks)


def weights_of(module: nn.Module) -> Tensor:
    """All parameters end to end, as a copy."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


def digest(tensors: Iterable[Tensor]) -> str:
    """Equal for equal bits."""
    whole = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def all_equal(results: Iterable[Any]) -> bool:
    """Whether the results of all ranks are the same, to the bit."""
    first, *others = results
    return all(_equal(first, other) for other in others)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
