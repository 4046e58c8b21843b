"""Whatever ranks do differently: they agree to the bit at the end, or every one of them is told."""

from __future__ import annotations

from collections import Counter

import pytest

from asymmetry.programs import FAULTS, Epoch, Program, draw_program, run_program
from murmura import run_world
from worlds import SECONDS

NUM_QUICK, NUM_ALL = 30, 300
SEEDS = [pytest.param(seed, marks=() if seed < NUM_QUICK else pytest.mark.slow) for seed in range(NUM_ALL)]


def run(program: Program, deadline: float) -> tuple[list[str], list[str]]:
    """The digests of the ranks that came to the end, and the errors of the others. Nobody hangs."""
    ends = run_world(run_program, program.num_ranks, program, deadline, timeout=SECONDS)
    return [end.digest for end in ends if end.digest], [end.error for end in ends if end.error]


@pytest.mark.parametrize("seed", SEEDS)
def test_legal_programs_keep_ranks_equal(seed: int) -> None:
    program = draw_program(seed, faulty=False)
    digests, errors = run(program, deadline=SECONDS / 2)  # a machine under load must not look like a fault
    assert not errors, program
    assert len(set(digests)) == 1, program


@pytest.mark.parametrize("seed", SEEDS)
def test_faulty_programs_end_alike_on_every_rank_within_the_deadline(seed: int) -> None:
    program = draw_program(seed, faulty=True)
    digests, errors = run(program, deadline=1.0)
    assert not (digests and errors), (program, digests, errors)
    assert len(errors) == program.num_ranks or len(set(digests)) == 1, program
    # All are told the same; or one is told what it did, and the others whom they lost or waited for.
    reasons = {error.partition(":")[0] for error in errors} - {"PeerLost", "PeerTimeout"}
    assert len(reasons) <= 1, (program, errors)


def test_the_programs_drawn_are_as_varied_as_they_should_be() -> None:
    programs = [draw_program(seed, faulty=False) for seed in range(NUM_QUICK)]
    steps = [step for program in programs for step in program.steps]
    turns = [turn for step in steps if not isinstance(step, Epoch) for turn in step]
    assert {program.num_ranks for program in programs} == {2, 3, 4}
    assert sum(isinstance(step, Epoch) for step in steps) > 10
    assert any(program.thaws_at < len(program.steps) for program in programs)
    assert {len(turn.uses) for turn in turns} == {1, 2, 3}
    assert {turn.way for turn in turns} == {"backward", "by hand", "all in flight"}
    assert {turn.zeroes for turn in turns} == {"none", "zeros", ""}
    assert sum(bool(turn.frozen) for turn in turns) > 50
    faults = Counter(fault for seed in range(NUM_QUICK) for fault in draw_program(seed, faulty=True).faults)
    assert faults.keys() == set(FAULTS)
