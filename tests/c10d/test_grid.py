"""The backend beside Gloo, in one world: what both carry out, they carry out alike."""

from __future__ import annotations

import pytest
import torch

from c10d import grid
from c10d.groups import run


def check(cases: list[grid.Case], world_size: int, hosts: list[int] | None = None) -> None:
    outcomes = run(grid.run_grid, world_size, cases, hosts=hosts)
    faults = [fault for each, _ in outcomes for fault in each]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    compared = set().union(*(each for _, each in outcomes))
    missing = {case.kind for case in cases if not is_refused_by_gloo(*case.kind)} - compared
    assert not missing, f"{len(missing)} kinds were not compared: {sorted(map(str, missing))[:20]}"


def is_refused_by_gloo(collective: str, op: str, dtype: torch.dtype) -> bool:
    return (collective == "all_reduce_sparse" and dtype is torch.float16) or (
        collective == "gather" and dtype.is_complex
    )


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sample_gives_what_gloo_gives(world_size: int) -> None:
    check(grid.sample(), world_size)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]])
def test_a_sample_on_several_hosts_gives_what_gloo_gives(hosts: list[int]) -> None:
    check(grid.sample(), len(hosts), hosts)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 4])
def test_everything_gives_what_gloo_gives(world_size: int) -> None:
    check(list(grid.all_cases()), world_size)


def test_closeness_is_a_matter_of_units_in_the_last_place() -> None:
    small = torch.full((3,), 2.0**-10, dtype=torch.bfloat16)
    for units, close in ((4, True), (5, False)):
        other = small * (1 + units * torch.finfo(torch.bfloat16).eps)
        assert grid.is_close(small, other, small, 4) == close
    assert not grid.is_exact(grid.Case("reduce", "SUM", torch.float32, (), False, "world"), 4)
    assert grid.is_exact(grid.Case("reduce", "MAX", torch.float32, (), False, "world"), 4)
    assert grid.is_exact(grid.Case("broadcast", "", torch.float16, (), False, "world"), 4)
