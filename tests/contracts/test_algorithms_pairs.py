"""Algorithms of few bytes in all circumstances of `lives`, each case against the simulation.

Any two circumstances meet in the quick cases on threads. Each of them meets every transport between processes, with up
to three ranks in the quick cases. The slow ones are everything that can be on threads, and the grid of algorithms,
lives and sizes on every transport.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from contracts.catalogue import INNER
from contracts.grids import SIZES
from contracts.lives import AXES, Case, Run, check, live, pairs_of, pairwise
from murmura import Transport, run_world
from worlds import SECONDS

PAIRS = pairwise()
ALONE = ("size", "hosts", (1, "two"))  # what cannot be
PLACES = [each for each in itertools.product(AXES["size"], AXES["hosts"]) if each != ALONE[2]]


def test_any_two_circumstances_meet() -> None:
    met = set().union(*map(pairs_of, PAIRS))
    for one, other in itertools.combinations(AXES, 2):
        for pair in itertools.product(AXES[one], AXES[other]):
            assert frozenset(zip((one, other), pair, strict=True)) in met or (one, other, pair) == ALONE


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_pairs(case: Case) -> None:
    check(case, run_world(live, case.size, case, hosts=case.places(), timeout=SECONDS))


# Between processes

HOSTS_OF = {"shared_memory": "two", "gloo": "one", "hierarchical": "two"}


def few_of(transport: str, size: int) -> list[Case]:
    """Other cases for each size: together every algorithm, and every value of every axis, on that transport."""
    turn, hosts = list(HOSTS_OF).index(transport), "one" if size == 1 else HOSTS_OF[transport]
    cases = []
    for number, name in enumerate(AXES["name"]):
        if number % len(SIZES) == SIZES.index(size):
            life = AXES["life"][(number + number // len(SIZES) + turn) % len(AXES["life"])]
            model = AXES["model"][(number + turn) % len(AXES["model"])]
            gradients = AXES["gradients"][(number // len(AXES["model"]) + turn) % len(AXES["gradients"])]
            cases.append(without_noise(Case(name, model, gradients, life, size, hosts)))
    return cases


def test_every_circumstance_meets_every_transport() -> None:
    for transport in HOSTS_OF:
        met = [case for size in SIZES for case in few_of(transport, size)]
        for axis in AXES:
            assert axis == "hosts" or {getattr(case, axis) for case in met} == set(AXES[axis]), (transport, axis)


@pytest.mark.parametrize("size", [pytest.param(each, marks=pytest.mark.slow) if each > 3 else each for each in SIZES])
@pytest.mark.parametrize("transport", HOSTS_OF)
def test_pairs_between_processes(transport: str, size: int) -> None:
    check_between_processes(transport, few_of(transport, size))


# The whole grid


def whole(name: str, life: str, size: int, hosts: str) -> list[Case]:
    """Every model, with gradients of every kind."""
    products = itertools.product(AXES["model"], AXES["gradients"])
    return [Case(name, model, gradients, life, size, hosts) for model, gradients in products]


def without_noise(case: Case) -> Case:
    """A bias before a BatchNorm has a gradient of rounding errors, whose sign is another in another order of sums."""
    is_noise = case.model == "batch_norm" and case.name in ("sign", "majority_vote", "qadam_sign")
    return case._replace(model="plain") if is_noise else case


@pytest.mark.slow
@pytest.mark.timeout(300)  # fifteen worlds; 20 s alone on two cores
@pytest.mark.parametrize(("size", "hosts"), PLACES)
@pytest.mark.parametrize("life", AXES["life"])
@pytest.mark.parametrize("name", AXES["name"])
def test_everything_on_threads(name: str, life: str, size: int, hosts: str) -> None:
    for case in whole(name, life, size, hosts):
        if life != "switched_to" or case == without_noise(case):
            try:
                test_pairs(case)
            except Exception as error:
                error.add_note(f"in {case}")
                raise


WORLDS = {"shared_memory": "one", "gloo": "one", "gloo between hosts": "two", "hierarchical": "two"}


def cases_of(size: int, hosts: str) -> list[Case]:
    """One for each algorithm and life; models and gradients take turns."""
    hosts = "one" if size == 1 else hosts
    grids = itertools.starmap(whole, itertools.product(AXES["name"], AXES["life"], [size], [hosts]))
    return [without_noise(cases[(number + size) % len(cases)]) for number, cases in enumerate(grids)]


def within(case: Case, transport: str) -> float:
    """To the bit between processes: where messages are summed by the algorithm, in the order of ranks.

    Gloo and the hierarchical transport sum in an order of their own, and weights that decentralized averages, before a
    switch, are x + (mean - x).
    """
    is_switched = case.life in ("switched_to", "switched_from")
    is_own = transport == "shared_memory" or case.name in (*INNER, "majority_vote")
    return case.within if is_own and not is_switched else 1e-9


def live_all(transport: Transport, cases: list[Case]) -> list[Run]:
    torch.set_num_threads(1)
    return [live(transport, case) for case in cases]


def check_between_processes(transport: str, cases: list[Case]) -> None:
    """One world for all, since worlds take long to start."""
    size, hosts = cases[0].size, cases[0].places()
    by_rank = run_world(live_all, size, cases, kind="processes", transport=transport, hosts=hosts, timeout=SECONDS)
    for case, runs in zip(cases, zip(*by_rank, strict=True), strict=True):
        check(case, runs, within(case, transport))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_and_life_between_processes(world: str, size: int) -> None:
    check_between_processes(world.partition(" ")[0], cases_of(size, WORLDS[world]))
