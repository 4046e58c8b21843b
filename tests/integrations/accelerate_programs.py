"""What ranks run in the tests of Accelerate; processes import it by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from integrations.loops import BATCH, CLIP, Task, dataset, model, optimizer, plain, weights
from murmura import Algorithm


def accelerator(algorithm: Algorithm | None, task: Task, **options: Any) -> Any:
    """murmura's Accelerator, or without an algorithm Accelerate's own."""
    import accelerate
    from accelerate.state import AcceleratorState

    from murmura.integrations.accelerate import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    options |= {
        "cpu": task.device == "cpu",
        "gradient_accumulation_steps": task.accumulate,
        "mixed_precision": task.precision,
    }
    return accelerate.Accelerator(**options) if algorithm is None else Accelerator(algorithm=algorithm, **options)


def prepared(found: Any, task: Task) -> tuple[Any, Any, Any]:
    module = model(task)
    loader = DataLoader(dataset(task, dist.get_world_size()), batch_size=BATCH)
    return tuple(found.prepare(module, optimizer(module.parameters()), loader))  # type: ignore[return-value]


def loop(found: Any, ddp: Any, steps: Any, loader: Any, after: Callable[[int], None] = lambda _: None) -> None:
    """The loop of Accelerate's own examples; `after(n)` is called when the n-th batch has been trained on."""
    for index, (inputs, targets) in enumerate(loader, 1):
        with found.accumulate(ddp):
            found.backward(nn.functional.mse_loss(ddp(inputs), targets))
            if found.sync_gradients:
                found.clip_grad_norm_(ddp.parameters(), CLIP)
            steps.step()
            steps.zero_grad()
        after(index)


def trained(algorithm: Algorithm | None, task: Task) -> list[Tensor]:
    found = accelerator(algorithm, task)
    ddp, steps, loader = prepared(found, task)
    loop(found, ddp, steps, loader)
    bare = found.unwrap_model(ddp)
    assert type(bare) is nn.Sequential
    found.free_memory()
    return weights(bare)


def beside_the_plain_loop(algorithm: Algorithm, task: Task) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The weights by murmura's Accelerator, by the plain loop, and by Accelerate's own DDP."""
    return trained(algorithm, task), plain(algorithm, task), trained(None, task)


def saved_and_killed(algorithm: Algorithm, task: Task, folder: Path, at: int) -> None:
    """Save after `at` batches; rank 1 is killed by a signal two batches later, which may be between two steps."""
    found = accelerator(algorithm, task)
    ddp, steps, loader = prepared(found, task)

    def after(index: int) -> None:
        if index == at:
            found.save_state(folder)
            torch.save(weights(ddp), folder / f"own-{dist.get_rank()}.pt")
        if index == at + 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    loop(found, ddp, steps, loader, after)


def resumed(algorithm: Algorithm, task: Task, folder: Path, at: int) -> list[Tensor]:
    found = accelerator(algorithm, task)
    ddp, steps, loader = prepared(found, task)
    found.load_state(folder)
    loop(found, ddp, steps, found.skip_first_batches(loader, at))
    return weights(found.unwrap_model(ddp))


def state_dicts(algorithm: Algorithm, task: Task, folder: Path) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    """This rank's weights, what get_state_dict gives, and the metrics of all ranks."""
    found = accelerator(algorithm, task)
    ddp, steps, loader = prepared(found, task)
    loop(found, ddp, steps, loader)
    found.save_model(ddp, folder)
    state = found.get_state_dict(ddp)
    metrics = found.gather_for_metrics(torch.full((2,), float(dist.get_rank())))
    found.wait_for_everyone()
    return weights(ddp), state, metrics


def refusals(folder: Path) -> list[str]:
    from accelerate import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

    import murmura
    from murmura.integrations.accelerate import Accelerator

    messages = []

    def refused(work: Callable[[], Any]) -> None:
        try:
            work()
        except murmura.MurmuraError as error:
            messages.append(str(error))

    task = Task()
    found = accelerator(murmura.DiLoCoAlgorithm(2), task, kwargs_handlers=[DistributedDataParallelKwargs(dim=1)])
    refused(lambda: Accelerator(algorithm="diloco", fsdp_plugin=FullyShardedDataParallelPlugin()))
    refused(lambda: Accelerator(algorithm=ADASUM, cpu=True))
    refused(lambda: found.prepare(murmura.DDP(model(task))))
    refused(lambda: found.prepare(model(task)))
    found = accelerator(murmura.GradientAllReduceAlgorithm(), task)
    ddp = found.prepare(model(task))
    assert found.prepare(ddp) is ddp
    with found.no_sync(ddp):
        ddp(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    refused(lambda: found.save_state(folder))
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    refused(lambda: Accelerator(algorithm="diloco"))  # without cpu=True
    return messages


def refused_alone() -> dict[str, str]:
    """What one process, which wraps no model, is told of choices that could not work with several."""
    import accelerate
    from accelerate.utils import DistributedType

    from murmura.integrations.accelerate import Accelerator

    class Sharding(Accelerator):
        distributed_type = DistributedType.DEEPSPEED  # as the environment makes it where DeepSpeed is installed

    def told(work: Callable[[], Any]) -> str:
        try:
            work()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    wrong: Any = [-1, ["diloco"], nn.Linear]
    plugin = accelerate.DeepSpeedPlugin(zero_stage=2)
    return {
        **{str(each): told(lambda each=each: Accelerator(algorithm=each, cpu=True)) for each in wrong},
        "plugin": told(lambda: Accelerator(algorithm="diloco", cpu=True, deepspeed_plugin=plugin)),
        "DeepSpeed": told(lambda: Sharding.adopt(accelerate.Accelerator(cpu=True), "diloco")),
        "adopt": told(lambda: Accelerator.adopt(accelerate.Accelerator(cpu=True), wrong[0])),
        "model": told(lambda: Accelerator(cpu=True).average_parameters(None)),  # type: ignore[arg-type]
        "good": told(lambda: Accelerator(algorithm="diloco", cpu=True).average_parameters(nn.Linear(1, 1))),
    }


def triggered() -> list[Tensor]:
    """The gradients after two forwards inside no_sync, the second backward of which synchronises, and clipped."""
    found = accelerator(ALL_REDUCE, Task())
    ddp = found.prepare(nn.Linear(1, 1, bias=False))
    inputs = torch.full((1, 1), float(dist.get_rank() + 1))
    with found.no_sync(ddp):
        first, second = ddp(inputs).sum(), ddp(10 * inputs).sum()
    found.backward(first)
    alone = [ddp.module.weight.grad.clone()]
    with found.trigger_sync_in_backward(ddp):
        found.backward(second)
    both = ddp.module.weight.grad.clone()
    found.clip_grad_value_(ddp.parameters(), 5.0)
    return [*alone, both, ddp.module.weight.grad.clone()]


def compiled(algorithm: Algorithm, task: Task, folder: Path) -> tuple[list[Tensor], list[Tensor], bool]:
    """The weights of a model that Accelerate compiles, before and after it is loaded again, and those of the loop."""
    found = accelerator(algorithm, task, dynamo_backend="eager")
    ddp, steps, loader = prepared(found, task)
    loop(found, ddp, steps, loader)
    before = weights(ddp)
    found.save_state(folder)
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.zero_()
    found.load_state(folder)
    is_found = found.ddp_of(found.unwrap_model(ddp, keep_torch_compile=False)) is ddp
    return weights(ddp), plain(algorithm, task), is_found and all(map(torch.equal, before, weights(ddp)))


def skipped_alone(algorithm: Algorithm, folder: Path) -> tuple[list[Any], list[Any]]:
    """The scheduler and the GradScaler of this rank, which are not those of another, at a save and after a load."""
    found = accelerator(algorithm, Task())
    module = nn.Linear(2, 1)
    steps = optimizer(module.parameters())
    rank, milestones = dist.get_rank(), torch.optim.lr_scheduler.MultiStepLR(steps, [2, 4])
    ddp, steps, scheduler = found.prepare(module, steps, milestones)
    found.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))  # as with fp16 on a GPU
    found.backward(ddp(torch.ones(1, 2)).sum())
    steps.step()
    for _ in range(2 * rank):
        scheduler.step()
    found.save_state(folder)
    saved = [scheduler.state_dict(), found.scaler.state_dict()]
    scheduler.step()
    found.scaler.update(1.0)
    found.load_state(folder)
    return saved, [scheduler.state_dict(), found.scaler.state_dict()]


def two_models(algorithm: Algorithm, folder: Path) -> list[bool]:
    """Whether each rank gets two models and their optimizers back, saved under names that Accelerate makes."""
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
    found = accelerator(algorithm, Task(), project_config=naming)
    modules = [nn.Linear(2, 1).double(), nn.Linear(3, 1).double()]
    optimizers = [torch.optim.Adam(module.parameters()) for module in modules]
    first, second, *steps = found.prepare(*modules, *optimizers)
    for _ in range(5):
        random = torch.rand(4, 5, dtype=torch.float64)
        found.backward(first(random[:, :2] + dist.get_rank()).sum() + second(random[:, 2:] * dist.get_rank()).sum())
        for each in steps:
            each.step()
            each.zero_grad()
        found.save_state()
    before = [weights(first), weights(second)]
    states = [each.state_dict()["state"][0]["exp_avg"].clone() for each in steps]
    for module in (first, second):
        torch.nn.init.zeros_(module.module.weight)
    found.load_state()
    after = [weights(first), weights(second)]
    again = [each.state_dict()["state"][0]["exp_avg"] for each in steps]
    return [
        *(
            torch.equal(*pair)
            for one, other in zip(before, after, strict=True)
            for pair in zip(one, other, strict=True)
        ),
        *map(torch.equal, states, again),
        first.algorithm_state_dict()["round"] == 5,
    ]


ALL_REDUCE: Any = "gradient_allreduce"
ADASUM: Any = "adasum"
