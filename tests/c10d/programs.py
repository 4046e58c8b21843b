"""Programs as people write them for torch.distributed; each returns tensors that must not depend on the backend."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), targets).backward()
        optimizer.step()


def weights(module: nn.Module) -> list[Tensor]:
    return [getattr(each, "full_tensor", each.detach)().detach().float().clone() for each in module.parameters()]


def ddp() -> list[Tensor]:
    wrapped = DistributedDataParallel(model())
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9))
    return weights(wrapped)


def ddp_with_unused_parameters() -> list[Tensor]:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = model(), model()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.one(inputs) if dist.get_rank() == 0 else self.other(inputs)

    wrapped = DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
    return weights(wrapped)


def ddp_fp16_hook() -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model())
    wrapped.register_comm_hook(None, fp16_compress_hook)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
    return weights(wrapped)


def ddp_powersgd_hook() -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    wrapped = DistributedDataParallel(model(32))
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    wrapped.register_comm_hook(state, powersgd.powerSGD_hook)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), steps=6)
    return weights(wrapped)


def join() -> list[Tensor]:
    from torch.distributed.algorithms.join import Join

    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    with Join([wrapped]):
        train(wrapped, optimizer, steps=STEPS + dist.get_rank())
    return weights(wrapped)


def zero() -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model())
    train(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.01))
    return weights(wrapped)


def fsdp2(mixed: bool = False, shape: tuple[int, ...] = (), allocated: bool = False) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")[-len(shape or (1,)) :]
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    sharded = model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    whole = fully_shard(sharded, mesh=mesh, mp_policy=policy)
    for each in whole.modules() if allocated else ():
        if hasattr(each, "set_allocate_memory_from_process_group_for_comm"):
            each.set_allocate_memory_from_process_group_for_comm(True)
    train(sharded, torch.optim.AdamW(sharded.parameters(), 0.01))
    return weights(sharded)


def fsdp2_bf16() -> list[Tensor]:
    return fsdp2(mixed=True)


def fsdp2_allocated() -> list[Tensor]:
    return fsdp2(allocated=True)


def hsdp() -> list[Tensor]:
    return fsdp2(shape=(2, dist.get_world_size() // 2))


def hsdp_of_pairs() -> list[Tensor]:
    return fsdp2(shape=(dist.get_world_size() // 2, 2))


def dtensor() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(48.0).view(12, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    moved = sharded.redistribute(mesh, [Shard(1)])
    product = torch.mm(moved, distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)]))
    summed = product.redistribute(mesh, [Replicate()]) if product.placements[0] != Partial() else product.full_tensor()
    return [sharded.full_tensor(), moved.to_local(), getattr(summed, "to_local", lambda: summed)()]


def tensor_parallel() -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, foreach=False)
    for step in range(STEPS):
        inputs, targets = batch(step, rank=0)
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(inputs), targets).backward()
        optimizer.step()
    return weights(parallel)


def checkpoint() -> list[Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    sharded = fully_shard(model())
    train(sharded, torch.optim.SGD(sharded.parameters(), 0.1))
    dcp.save(get_model_state_dict(sharded), checkpoint_id=f"{folder[0]}/now")
    dcp.async_save(
        get_model_state_dict(sharded), checkpoint_id=f"{folder[0]}/later", process_group=dist.new_group()
    ).result()
    dcp.async_save(get_model_state_dict(sharded), checkpoint_id=f"{folder[0]}/on the default group").result()
    found = []
    names = "now", "later", "on the default group"
    for name in names:
        other = fully_shard(model(16))
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=f"{folder[0]}/{name}")
        set_model_state_dict(other, state)
        found += weights(other)
    assert all(torch.equal(*each) for each in zip(found, weights(sharded) * len(names), strict=True))
    return found


def objects() -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "values": torch.full((rank + 1,), float(rank))})
    on_first: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object("x" * rank, on_first)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {each}" for each in range(size)] if rank == 0 else None)
    assert scattered == [f"for {rank}"]
    told: list[Any] = [{"from": rank}, "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(told)
    assert told == [{"from": 0}, "text"]
    if rank == 0:
        dist.send_object_list([1, "two"], 1)
    elif rank == 1:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, 0)
        assert received == [1, "two"]
    lengths = [float(len(each)) for each in on_first or ()]
    return [*(each["values"] for each in gathered), torch.tensor(lengths)]


def functional() -> list[Tensor]:
    from torch.distributed import _functional_collectives as funcol

    rank, size = dist.get_rank(), dist.get_world_size()
    own, group = torch.arange(8.0) + rank, dist.group.WORLD
    return [
        funcol.all_reduce(own, "sum", group).clone(),
        funcol.all_gather_tensor(own, 0, group).clone(),
        funcol.reduce_scatter_tensor(own, "sum", 0, group).clone(),
        funcol.all_to_all_single(own, [8 // size] * size, [8 // size] * size, group).clone(),
        funcol.broadcast(own, 0, group).clone(),
        *(each.clone() for each in funcol.all_reduce_coalesced([own, own * 2], "avg", group)),
        *(each.clone() for each in funcol.all_gather_into_tensor_coalesced([own, own * 2], group)),
        *(each.clone() for each in funcol.reduce_scatter_tensor_coalesced([own, own * 2], "sum", [0, 0], group)),
    ]


def compiled(compiler: str = "aot_eager") -> list[Tensor]:
    from torch.distributed import _functional_collectives as funcol

    @torch.compile(backend=compiler, fullgraph=True)
    def step(inputs: Tensor) -> Tensor:
        return funcol.all_reduce(inputs * 2, "sum", dist.group.WORLD) + 1

    wrapped = torch.compile(DistributedDataParallel(model()), backend=compiler)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
    return [step(torch.arange(5.0) + dist.get_rank()), *weights(wrapped)]


def compiled_by_inductor() -> list[Tensor]:
    return compiled("inductor")


def pipeline() -> list[Tensor]:
    from torch.distributed.pipelining import ScheduleGPipe

    return run_pipeline(ScheduleGPipe, 2)


def pipeline_1f1b() -> list[Tensor]:
    from torch.distributed.pipelining import Schedule1F1B

    return run_pipeline(Schedule1F1B, 4)


def run_pipeline(schedule_class: Any, n_microbatches: int) -> list[Tensor]:
    from torch.distributed.pipelining import PipelineStage

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = schedule_class(stage, n_microbatches=n_microbatches, loss_fn=nn.functional.mse_loss)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=inputs, losses=losses)
    else:
        schedule.step()
    gradients = [each.grad.clone() for each in layers[rank].parameters() if each.grad is not None]
    return [*gradients, *(loss.detach() for loss in losses)]


def barriers_and_metrics() -> list[Tensor]:
    metrics = torch.tensor([float(dist.get_rank()), 1.0], dtype=torch.float64)
    dist.barrier()
    works = [dist.all_reduce(metrics, async_op=True), dist.barrier(async_op=True)]
    for work in works:
        work.wait()
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    chained = future.then(lambda done: done.value()[0] * 2)
    return [metrics, chained.wait()]


PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {
    each.__name__: each
    for each in (
        ddp, ddp_with_unused_parameters, ddp_fp16_hook, ddp_powersgd_hook, join, zero, fsdp2, fsdp2_bf16,
        fsdp2_allocated, hsdp, hsdp_of_pairs, dtensor, tensor_parallel, checkpoint, objects, functional, compiled,
        pipeline, pipeline_1f1b, barriers_and_metrics,
    )
}  # fmt: skip
NEEDING_A_COMPILER = {"compiled_by_inductor": compiled_by_inductor}


def run_all(names: list[str]) -> dict[str, Any]:
    """What each program returns on this rank, or how it failed."""
    import traceback
    import warnings

    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            results[name] = [each.detach().clone() for each in (PROGRAMS | NEEDING_A_COMPILER)[name]()]
        except Exception:
            results[name] = traceback.format_exc()
        dist.barrier()
    return results
