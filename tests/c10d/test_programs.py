"""Programs written for torch.distributed, unchanged: the results are those on Gloo."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from c10d import programs
from c10d.groups import run

SHORT = ["ddp", "ddp_powersgd_hook", "fsdp2", "functional", "objects", "barriers_and_metrics"]


def check(names: list[str], world_size: int) -> None:
    ours = run(programs.run_all, world_size, names)
    theirs = run(programs.run_all, world_size, names, backend="gloo")
    faults: list[Any] = []
    for name in names:
        for rank in range(world_size):
            one, other = ours[rank][name], theirs[rank][name]
            if isinstance(one, str) or isinstance(other, str):
                faults.append(f"{name} on rank {rank}: {one if isinstance(one, str) else 'gloo: ' + str(other)}")
            elif not all(is_equal(*each, world_size, name) for each in zip(one, other, strict=True)):
                faults.append(f"{name} on rank {rank}: {one} is not {other}"[:1000])
    assert not faults, "\n".join(faults)


def is_equal(one: torch.Tensor, other: torch.Tensor, world_size: int, name: str) -> bool:
    """To the bit for two ranks; for more, another order of summation rounds otherwise."""
    if world_size == 2:
        return torch.equal(one, other)
    limit = 2e-3 if name.endswith(("fp16_hook", "bf16")) else 1e-5
    return torch.allclose(one, other, rtol=limit, atol=limit)


def test_a_few_programs() -> None:
    check(SHORT, 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_programs(world_size: int) -> None:
    check(list(programs.PROGRAMS), world_size)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
@pytest.mark.parametrize("world_size", [2, 4])
def test_programs_that_need_a_compiler(world_size: int) -> None:
    check(list(programs.NEEDING_A_COMPILER), world_size)
