"""The backend beside Gloo, in one world: what both carry out, they carry out alike."""

from __future__ import annotations

import pytest

from c10d import grid
from c10d.groups import run


def check(cases: list[grid.Case], world_size: int) -> None:
    outcomes = run(grid.run_grid, world_size, cases)
    faults = [fault for each, _ in outcomes for fault in each]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])
    assert all(compared > len(cases) / 3 for _, compared in outcomes), outcomes


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sample_gives_what_gloo_gives(world_size: int) -> None:
    check(grid.sample(150), world_size)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 4])
def test_everything_gives_what_gloo_gives(world_size: int) -> None:
    check(list(grid.all_cases()), world_size)
