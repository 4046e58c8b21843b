"""Communication hooks: torch's own run unchanged, on its process group, and give what they give torch's wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from ddp.models import all_equal, backward, fill, on_ranks, values, weight, weights_of
from murmura import DDP, Cast, GradientAllReduceAlgorithm, InProcessTransport, Transport, UsageError, run_world
from murmura.buckets import Bucket
from murmura.ddp.comm_hook import CommHook, GradBucket
from worlds import SECONDS, torch_group


def mlp() -> nn.Module:
    """Small enough for one bucket, with matrices that PowerSGD compresses."""
    return fill(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 4)).double())


def train(model: nn.Module, rank: int, num_steps: int) -> Tensor:
    """Shards of a fixed problem."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        model(values(8, 20, seed=100 * step + rank, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def on_gloo(fn: Any, num_ranks: int, folder: Path, *args: Any) -> list[Any]:
    options = {"kind": "processes", "timeout": SECONDS}
    return run_world(_with_group, num_ranks, str(folder / "store"), fn, *args, **options)


def _with_group(transport: Transport, store: str, fn: Any, *args: Any) -> Any:
    with torch_group(transport, store):
        return fn(transport, *args)


# Beside torch's wrapper

# Not here: torch's quantisation and batched PowerSGD hooks, which fail on Gloo with torch's own wrapper, too.
HOOKS = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "fp16 wrapped": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD": (
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=5),
        powerSGD_hook.powerSGD_hook,
    ),
    "post-local SGD": (
        lambda: post_localSGD_hook.PostLocalSGDState(
            None, None, start_localSGD_iter=3, post_local_gradient_allreduce=False
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
}


def train_both(transport: Transport, names: list[str], num_steps: int) -> list[tuple[str, float]]:
    """The largest difference of any weight from that of torch's wrapper with the same hook."""
    differences = []
    for name in names:
        make_state, hook = HOOKS[name]
        results = []
        for wrapper in (DDP(mlp(), transport), DistributedDataParallel(mlp())):
            wrapper.register_comm_hook(make_state(), hook)
            results.append(train(wrapper, transport.rank, num_steps))
        differences.append((name, (results[0] - results[1]).abs().max().item()))
    return differences


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchs_own_hooks_give_the_weights_of_torchs_wrapper(tmp_path: Path) -> None:
    for differences in on_gloo(train_both, 2, tmp_path, list(HOOKS), 30):
        assert len(differences) == len(HOOKS)
        assert max(difference for _, difference in differences) < 1e-6, differences


def simulated_bf16(num_ranks: int, num_steps: int) -> Tensor:
    """One process: gradients of all shards, cast to bf16, divided, summed in bf16 as a ring of two does."""
    models = [mlp() for _ in range(num_ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    for step in range(num_steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(values(8, 20, seed=100 * step + rank, dtype=torch.float64)).square().mean().backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            total = sum(each.grad.to(torch.bfloat16).div_(num_ranks) for each in parameters)
            for each in parameters:
                each.grad.copy_(total)
        for optimizer in optimizers:
            optimizer.step()
    return weights_of(models[0])


def several_hooks(transport: Transport) -> dict[str, Any]:
    """What the quick test looks at, in one world."""
    seen: dict[str, Any] = {"both": train_both(transport, ["powerSGD", "fp16"], 8)}

    ddp = DDP(mlp(), transport)
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    seen["bf16"] = train(ddp, transport.rank, 5)

    buckets: list[Any] = []

    def own_hook(state: list[Any], bucket: GradBucket) -> Any:
        state.append((bucket.index(), bucket.is_last(), [tuple(each.shape) for each in bucket.gradients()]))
        assert [each.shape for each in bucket.parameters()] == [each.shape for each in bucket.gradients()]
        assert bucket.buffer().is_contiguous()
        assert bucket.buffer().numel() == sum(each.numel() for each in bucket.parameters())
        bucket.set_buffer(torch.full_like(bucket.buffer(), 7.0))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DDP(mlp(), transport, bucket_size_bytes=2000, process_group=None)
    ddp.register_comm_hook(buckets, own_hook)
    ddp.module[4](ddp.module[3](torch.ones(1, 20, dtype=torch.float64))).sum().backward()
    seen["buckets"] = buckets
    gradients = {name: each.grad for name, each in ddp.module.named_parameters() if each.grad is not None}
    seen["sevens"] = {name: set(gradient.flatten().tolist()) for name, gradient in gradients.items()}

    refusals = {}
    for name, attempt in {
        "twice": lambda: ddp.register_comm_hook(None, own_hook),
        "switch": lambda: ddp.set_algorithm("bytegrad"),
        "no function": lambda: DDP(mlp(), transport).register_comm_hook(None, 3),  # type: ignore[arg-type]
        "bytegrad": lambda: DDP(mlp(), transport, algorithm="bytegrad").register_comm_hook(
            None, quantization_hooks.quantization_pertensor_hook
        ),
        "compressor": lambda: DDP(
            mlp(), transport, algorithm=GradientAllReduceAlgorithm(compressor=Cast(torch.float16))
        ).register_comm_hook(None, default_hooks.fp16_compress_hook),
        "other ranks": lambda: DDP(mlp(), InProcessTransport.create_group(1)[0]).register_comm_hook(
            None, default_hooks.allreduce_hook
        ),
    }.items():
        try:
            attempt()
        except Exception as error:
            refusals[name] = f"{type(error).__name__}: {error}"
    seen["refusals"] = refusals
    return seen


@pytest.mark.timeout(120)
def test_hooks_see_their_buckets_and_return_the_gradients(tmp_path: Path) -> None:
    results = on_gloo(several_hooks, 2, tmp_path)
    for seen in results:
        assert max(difference for _, difference in seen["both"]) < 1e-6
        torch.testing.assert_close(seen["bf16"], simulated_bf16(2, 5), rtol=0, atol=1e-12)
        assert [(index, is_last) for index, is_last, _ in seen["buckets"]] == [
            (0, False),
            (1, False),
            (2, False),
            (3, True),
        ]
        assert seen["buckets"][0][2] == [(4,), (4, 20), (20,)]
        assert seen["sevens"] == {"4.weight": {7.0}, "4.bias": {7.0}}
        refusals = seen["refusals"]
        assert "a DDP has one hook" in refusals["twice"]
        assert "a communication hook exchanges the gradients" in refusals["switch"]
        assert refusals["no function"].startswith("ConfigError: hook=3 cannot be called")
        assert "use algorithm=ByteGradAlgorithm()" in refusals["bytegrad"]
        assert "compressor=Cast(torch.float16)" in refusals["compressor"]
        assert "rank 0 of 1 for DDP" in refusals["other ranks"]
    assert all_equal(seen["bf16"] for seen in results)


# Without a process group


def test_a_hook_without_torch_distributed_is_refused() -> None:
    def run(transport: Transport) -> str:
        ddp = DDP(weight(), transport)
        with pytest.raises(UsageError, match=r"init_process_group first, or use .*Phased") as caught:
            ddp.register_comm_hook(None, post_localSGD_hook.post_localSGD_hook)
        backward(ddp, transport.rank)  # the model goes on without
        return str(caught.value)

    on_ranks(run, 2)


def bucket_of(numel: int) -> Bucket:
    return Bucket(0, ["p"], [nn.Parameter(torch.zeros(numel))], lambda n, dtype, device: torch.zeros(n, dtype=dtype))


def finished(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType, not a torch.futures.Future"),
        (finished(torch.zeros(3)), "holds 3 elements, and bucket 0 has 2 elements"),
        (finished("text"), "holds str"),
    ],
)
def test_what_a_hook_may_not_return(returned: Any, words: str) -> None:
    def run(transport: Transport) -> None:
        with pytest.raises(UsageError, match=words):
            CommHook(None, lambda state, bucket: returned, transport).start(bucket_of(2), is_last=True)()

    on_ranks(run, 1)


def test_a_future_that_never_comes_ends_at_the_deadline() -> None:
    def run(transport: Transport) -> None:
        transport.timeout = 0.05
        hook = CommHook(None, lambda state, bucket: torch.futures.Future(), transport)
        with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.1 s for the future of the communication hook"):
            hook.start(bucket_of(2), is_last=True)()

    on_ranks(run, 1)


def test_a_buffer_of_another_length_is_refused() -> None:
    with pytest.raises(UsageError, match="got 3 elements for bucket 0, which has 2"):
        GradBucket(bucket_of(2), is_last=True).set_buffer(torch.zeros(3))
