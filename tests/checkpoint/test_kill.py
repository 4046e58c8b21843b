"""Whenever a rank is killed, the last complete checkpoint is there, and the run goes on from it to the same bits."""

from __future__ import annotations

import builtins
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.programs import NUM_STEPS, SAVE_EVERY, train
from ddp.models import weight
from murmura import DDP, Checkpointer, InProcessTransport, PeerLost, Transport, run_world
from worlds import SECONDS


def train_with_noise(
    transport: Transport, way: str, folder: Path | None, kill: tuple[int, int] | None = None
) -> tuple[torch.Tensor, list[int], int]:
    return train(transport, way, folder, dropout=0.3, kill=kill)


def processes(fn: Callable[..., Any], *args: Any, size: int = 2) -> list[Any]:
    return run_world(fn, size, *args, kind="processes", timeout=SECONDS)


@pytest.mark.parametrize("way", ["gradient_allreduce", pytest.param("shift_one", marks=pytest.mark.slow)])
def test_a_run_killed_at_a_random_step(way: str, tmp_path: Path) -> None:
    whole = processes(train_with_noise, way, None)
    step, rank = random.Random().randrange(NUM_STEPS), random.Random().randrange(2)
    with pytest.raises(PeerLost, match=f"rank {rank} was killed by SIGKILL"):
        processes(train_with_noise, way, tmp_path, (step, rank))
    resumed = processes(train_with_noise, way, tmp_path)
    begin = step // SAVE_EVERY * SAVE_EVERY
    for (weights, _, _), (again, steps, _) in zip(whole, resumed, strict=True):
        assert steps == list(range(begin, NUM_STEPS)), f"rank {rank} was killed in step {step}"
        assert torch.equal(weights, again), f"rank {rank} was killed in step {step}"


OPERATIONS = {
    builtins: ("open",),
    os: ("fsync", "rename", "mkdir", "unlink", "rmdir", "open"),
    shutil: ("rmtree",),
    torch: ("save", "load"),
}


def save_and_die(folder: Path, die_before: int | None) -> int:
    """Save steps 1 and 2 with keep=1; while step 2 is saved, be killed before that operation on files.

    Returns how many operations there were.
    """
    (transport,) = InProcessTransport.create_group(1)
    ddp = DDP(weight(0.0), transport)
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, ddp=ddp)
    torch.nn.init.ones_(ddp.module.weight)
    count = 0

    def counting(operation: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            if count == die_before:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return operation(*args, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for module, names in OPERATIONS.items():
            for name in names:
                patch.setattr(module, name, counting(getattr(module, name)))
        checkpointer.save(2, ddp=ddp)
    transport.close()
    return count


def restore(folder: Path) -> tuple[int, float]:
    (transport,) = InProcessTransport.create_group(1)
    ddp = DDP(weight(7.0), transport)
    checkpointer = Checkpointer(folder, keep=1)
    restored = checkpointer.load(ddp=ddp)
    assert restored is not None
    checkpointer.save(3, ddp=ddp)
    transport.close()
    return restored.step, ddp.module.weight.item()


def die_at_every_instant(_: Transport, folder: Path) -> list[tuple[int, float, list[str]]]:
    """In a process of its own, which forks: what was found after each death, and what was left after the next save."""
    found = []
    for die_before in range(save_and_die(folder / "whole", None)):
        own = folder / str(die_before)
        if (pid := os.fork()) == 0:
            save_and_die(own, die_before)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        found.append((*restore(own), [path.name for path in own.iterdir()]))
    return found


def test_a_kill_at_any_instant_of_saving(tmp_path: Path) -> None:
    (found,) = processes(die_at_every_instant, tmp_path, size=1)
    assert len(found) > 15
    assert {(step, value) for step, value, _ in found} == {(1, 0.0), (2, 1.0)}
    steps = [step for step, _, _ in found]
    assert steps == sorted(steps)
    assert all(left == ["step-000000003"] for _, _, left in found)
