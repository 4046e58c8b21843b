"""Whatever legal thing users do, in whatever order: every rank holds what the simulation says, after every action."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from sequences.actions import (
    HAZARDS,
    Backward,
    Choice,
    Close,
    Collect,
    Forward,
    Net,
    Script,
    Step,
    columns,
)
from sequences.campaign import compare, run_campaign
from sequences.drawing import draw_script
from sequences.position import ALGORITHMS
from sequences.rank import Told
from sequences.simulation import simulate

NUM_QUICK, NUM_THREADS, NUM_PROCESSES = 2, 500, 100
LEAST_WHOLE, LEAST_COMPARED = 0.6, 0.75  # of scripts to their end, and of actions: topk's ties decide the most
PATIENCE = 20.0  # seconds of a wait: a machine under load must not look like a fault


def hold(algorithm: str, num_scripts: int, world: str) -> None:
    findings = run_campaign(algorithm, range(num_scripts), world, patience=PATIENCE)
    assert findings.num_scripts == num_scripts or findings.failures
    assert not findings.failures, "\n" + "\n\n".join(str(failure) for _, failure in findings.failures[:3])
    assert findings.num_whole >= int(LEAST_WHOLE * num_scripts), findings
    assert findings.num_compared >= LEAST_COMPARED * findings.num_actions, findings


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_few_scripts_on_threads(algorithm: str) -> None:
    hold(algorithm, NUM_QUICK, "threads")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_scripts_on_threads(algorithm: str) -> None:
    hold(algorithm, NUM_THREADS, "threads")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", ["processes", "gloo"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_many_scripts_on_processes(algorithm: str, world: str) -> None:
    hold(algorithm, NUM_PROCESSES, world)


# The drawing


def test_scripts_depend_on_the_seed_alone() -> None:
    for algorithm in ALGORITHMS:
        assert draw_script(3, algorithm) == draw_script(3, algorithm) != draw_script(4, algorithm)


def test_scripts_are_as_varied_as_they_should_be() -> None:
    scripts = [draw_script(seed, algorithm) for algorithm in ALGORITHMS for seed in range(60)]
    actions = Counter(type(action).__name__ for script in scripts for action in script.actions)
    assert len(actions) == 17
    assert min(actions.values()) >= 20, actions
    assert {script.num_ranks for script in scripts} == {2, 3, 4, 5}
    assert {script.buffers for script in scripts} == {"", "norm", "mean"}
    hazards = Counter(hazard for script in scripts for hazard in script.hazards[-1])
    assert hazards.keys() == set(HAZARDS)
    assert sum(not script.hazards[-1] for script in scripts) > 50
    collects = {action.kind for script in scripts for action in script.actions if isinstance(action, Collect)}
    assert len(collects) == 8
    forwards = [action for script in scripts for action in script.actions if isinstance(action, Forward)]
    kinds = {(action.kind, action.in_eval, action.in_no_sync) for action in forwards}
    assert len(kinds) == 20
    ends = Counter(type(script.actions[-2]).__name__ for script in scripts)
    assert ends["Step"] > 10
    assert all(6 <= len(script.actions) <= 30 for script in scripts)


# The simulation, on numbers that can be done in one's head or by a plain loop


def script_of(choice: Choice, *actions: object, num_ranks: int = 2) -> Script:
    every: tuple[object, ...] = (*actions, Close())
    return Script(0, num_ranks, choice, "", "sgd", every, (frozenset(),) * len(every))  # type: ignore[arg-type]


def forward(slot: int = 0, kind: str = "ddp", in_no_sync: bool = False) -> Forward:
    return Forward(slot, kind, False, in_no_sync, (False, False))


def scale_of(rows: torch.Tensor, at: int) -> torch.Tensor:
    names = columns(Net(""))
    return rows[at][torch.tensor([name == "scale" for name in names])]


def test_ranks_that_step_wait_in_the_simulation_for_one_that_does_not() -> None:
    choice = Choice("local_sgd")
    script = script_of(choice, forward(), Backward((0,), False, False), Step((1,)), Collect("barrier"))
    stepped, skipped = simulate(script)
    assert not torch.equal(scale_of(stepped, 1), scale_of(stepped, 2))  # it has stepped and met the other
    assert torch.equal(scale_of(skipped, 1), scale_of(skipped, 2))
    assert torch.equal(scale_of(skipped, 3), scale_of(stepped, 3))


def test_a_script_in_which_ranks_wait_for_each_other_is_found() -> None:
    script = script_of(Choice("local_sgd"), forward(), Backward((0,), False, False), Step((1,)))
    simulate(script)
    without_close = replace(script, actions=script.actions[:-1])  # so the rank that skips never comes
    with pytest.raises(AssertionError, match="ranks wait for each other"):
        simulate(without_close)


def test_the_last_forward_of_the_root_decides_whether_a_backward_synchronises() -> None:
    choice = Choice("gradient_allreduce")
    inside, outside = forward(0, in_no_sync=True), forward(1)
    both = simulate(script_of(choice, inside, outside, Backward((0,), False, True)))
    one = simulate(script_of(choice, outside, inside, Backward((1,), False, False)))
    assert torch.equal(*(each[2].nan_to_num() for each in both))
    assert not torch.equal(*(each[2].nan_to_num() for each in one))


@pytest.mark.parametrize("column", ["scale", "gradient of stem.weight"])
def test_a_wrong_number_anywhere_is_a_failure(column: str) -> None:
    script = draw_script(0, "gradient_allreduce", hazards=())
    at = next(at for at, action in enumerate(script.actions) if isinstance(action, Backward))
    rows = simulate(script)
    told = [each.clone() for each in rows]
    assert compare(script, [Told(each) for each in told], rows) is None
    told[1][at][columns(Net(script.buffers)).index(column)] += 1e-7
    failure = compare(script, [Told(each) for each in told], rows)
    assert failure is not None
    assert failure.at == at
    assert column in failure.what


@pytest.mark.parametrize(("algorithm", "fails"), [("gradient_allreduce", True), ("async", False)])
def test_replicas_that_should_be_equal_are_so_to_the_bit(algorithm: str, fails: bool) -> None:
    script = draw_script(0, algorithm, hazards=())
    rows = simulate(script)
    told = [each.clone() for each in rows]
    told[1][0][0] = torch.nextafter(rows[1][0][0], torch.tensor(9.0, dtype=torch.float64))
    failure = compare(script, [Told(each) for each in told], rows)
    assert (failure is not None) == fails  # async adds mean - x to x, which promises no last place
    if failure is not None:
        assert "equal to the bit" in failure.what
