"""Gradient algorithms on torch's DistributedDataParallel: the numbers, its features, what is refused."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from c10d.groups import run
from murmura import (
    DDP,
    Algorithm,
    ByteGradAlgorithm,
    Cast,
    ConfigError,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    MinMaxUInt8,
    Phased,
    QAdamAlgorithm,
    ReplicaDivergence,
    TransportClosed,
    UsageError,
)
from murmura.integrations import torch_ddp

STEPS = 6
FEEDBACK = ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8(block_size=1)))  # by element, wherever buckets end


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2)).double()


def batch(step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()), dtype=torch.float64)


def train(wrapped: Any, steps: range = range(STEPS), *, accumulate: int = 1) -> list[Tensor]:
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for step in steps:
        optimizer.zero_grad()
        for micro in range(accumulate):
            with contextlib.nullcontext() if micro == accumulate - 1 else wrapped.no_sync():
                wrapped(batch(accumulate * step + micro)).square().mean().backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapped.parameters()]


def stock(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(), bucket_cap_mb=0.001, **options)  # many buckets, cut anew after one round


def beside_torch(algorithm: Algorithm | str, accumulate: int, options: dict[str, Any]) -> tuple[list[Tensor], ...]:
    """The weights with stock DDP, with `algorithm` on it, and with murmura's DDP."""
    plain = train(stock(**options), accumulate=accumulate)
    wrapped = stock(**options)
    applied = torch_ddp.apply(wrapped, algorithm)
    hooked = train(wrapped, accumulate=accumulate)
    applied.close()
    with contextlib.closing(DDP(model(), algorithm=algorithm, bucket_cap_mb=0.001)) as ddp:
        ours = train(ddp, accumulate=accumulate)
    return plain, hooked, ours


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.slow), "murmura"])
def test_gradient_allreduce_is_what_torch_does(backend: str) -> None:
    options = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
    for plain, hooked, ours in run(beside_torch, 2, "gradient_allreduce", 4, options, backend=backend):
        assert all(torch.equal(*pair) for pair in zip(plain, hooked, strict=True))
        assert all(torch.equal(*pair) for pair in zip(ours, hooked, strict=True))


@pytest.mark.parametrize("is_rounded", [pytest.param(True, marks=pytest.mark.slow), False])
def test_compressors_give_what_they_give_under_murmuras_wrapper(is_rounded: bool) -> None:
    """Element by element, so that it does not matter how buckets are cut; residuals follow torch's second cut."""
    algorithm = GradientAllReduceAlgorithm(compressor=Cast(torch.float32)) if is_rounded else FEEDBACK
    ranks = run(beside_torch, 3, algorithm, 1, {})
    for plain, hooked, ours in ranks:
        assert not all(torch.equal(*pair) for pair in zip(plain, hooked, strict=True))
        assert all(torch.equal(*pair) for pair in zip(ours, hooked, strict=True))
        assert all(torch.equal(*pair) for pair in zip(ranks[0][1], hooked, strict=True))


def resumed() -> tuple[list[Tensor], list[Tensor]]:
    whole, first, second = stock(), stock(), stock()
    torch_ddp.apply(whole, FEEDBACK)
    expected = train(whole)
    saved = torch_ddp.apply(first, FEEDBACK)
    train(first, range(4))
    again = torch_ddp.apply(second, FEEDBACK)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(saved.state_dict())
    with pytest.raises(ConfigError, match="was saved by Other"):
        again.load_state_dict({**saved.state_dict(), "name": "Other"})
    return expected, train(second, range(4, STEPS))


def test_a_resumed_run_goes_on_with_what_compression_left_over() -> None:
    for expected, found in run(resumed, 2):
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def refused() -> list[str]:
    wrapped, messages = stock(), []
    for algorithm in (LocalSGDAlgorithm(2), QAdamAlgorithm(), GradientAllReduceAlgorithm(average=False), "diloco"):
        with pytest.raises(UsageError) as caught:
            torch_ddp.apply(wrapped, algorithm)
        messages.append(str(caught.value))
    with pytest.raises(UsageError, match="does more than average gradients"):
        torch_ddp.apply(wrapped, Phased(FEEDBACK, 1, then=GradientAllReduceAlgorithm()))
    with pytest.raises(UsageError, match=r"wrapped by torch's DistributedDataParallel, and this is a Sequential"):
        torch_ddp.apply(model(), FEEDBACK)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is unknown"):
        torch_ddp.apply(wrapped, "adasum")
    with pytest.raises(ReplicaDivergence, match=r"the ranks run different algorithms:\n  rank 0: GradientAll"):
        torch_ddp.apply(wrapped, "bytegrad" if dist.get_rank() else "gradient_allreduce")
    return messages


def test_what_a_hook_cannot_do_is_refused_with_what_to_use() -> None:
    messages = run(refused, 2)[0]
    assert len(messages) == 4
    assert all("murmura.DDP(model, algorithm=...)" in each for each in (*messages[:2], messages[3]))
    assert "multiply the loss" in messages[2]


def failing() -> None:
    wrapped = stock()
    applied = torch_ddp.apply(wrapped, FEEDBACK)
    train(wrapped, range(2))
    applied.close()
    with pytest.raises((TransportClosed, RuntimeError), match="closed this transport"):  # torch may hand on the text
        wrapped(batch(0)).sum().backward()


def test_a_backward_after_close_is_an_error() -> None:
    run(failing, 2)


def forgotten() -> bool:
    wrapped = stock()
    transport = torch_ddp.apply(wrapped, "bytegrad")._transport
    train(wrapped, range(2))
    gone = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    return gone() is None and transport.closed


def test_the_connection_ends_with_the_wrapper() -> None:
    assert all(run(forgotten, 2))
