"""Grids of cases: all of them in the long run, a sample that shows every value in the short one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

SIZES = (1, 2, 3, 4, 5, 8)
INTERVALS = (1, 2, 3)
HOSTS = (
    [0, 1],
    [0, 0, 1],
    [0, 0, 1, 1],
    [0, 1, 0, 1],
    [0, 1, 2, 2],
    [3, 3, 1, 1, 1],
    [0, 0, 1, 1, 2, 2],
    [0, 1, 1, 0, 2, 2, 2, 1],
)
EQUAL_HOSTS = tuple(hosts for hosts in HOSTS if len({hosts.count(host) for host in hosts}) == 1)
UNEQUAL_HOSTS = tuple(hosts for hosts in HOSTS if hosts not in EQUAL_HOSTS)


def grid(names: str, *values: Any, sample: int = 5) -> Any:
    """Every combination of `values`; one in `sample`, spread evenly over each of them, is not slow."""
    cases = []
    for places in itertools.product(*(range(len(each)) for each in values)):
        case = [each[place] for each, place in zip(values, places, strict=True)]
        marks = [pytest.mark.slow] * (sum(places) % sample != 0)
        cases.append(pytest.param(*case, marks=marks, id="-".join(map(_name, case))))
    return pytest.mark.parametrize(names, cases)


def _name(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list | tuple) else getattr(value, "name", str(value))
