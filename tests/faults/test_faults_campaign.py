"""Random faults in training, judged by `campaign`: a sample of them here, hundreds in the long run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import campaign
import pytest
from campaign_cases import ALGORITHMS, BACKEND, FAULTS, MOMENTS, PERIOD, PROGRAMS, THREADS, TRANSPORTS, Case
from campaign_rank import STORY, Ending

NUM_CASES = 4 * PERIOD


def test_each_period_has_every_transport_with_every_algorithm_and_every_program():
    wanted = {(transport, each) for transport in TRANSPORTS if transport != BACKEND for each in ALGORITHMS}
    wanted |= {(BACKEND, program) for program in PROGRAMS}
    for first in (0, PERIOD, 2 * PERIOD):
        cases = [campaign.case_of(7, number) for number in range(first, first + PERIOD)]
        assert {(case.transport, case.algorithm) for case in cases} == wanted


def test_the_campaign_has_every_moment_and_every_fault():
    cases = campaign.cases_of(0, NUM_CASES)
    assert {case.moment for case in cases} == set(MOMENTS)
    assert {(case.transport, case.fault) for case in cases} == {
        (transport, fault) for transport, faults in FAULTS.items() for fault in faults
    }


# The judge


LOST = Case(
    seed=0, number=0, transport=THREADS, algorithm="bytegrad", other_algorithm="async", world_size=4, hosts=None,
    culprit=2, fault="raise", moment="step", count=1, delay=0.0, late=None, in_world=False,
)  # fmt: skip
RIGHT = Ending(
    rank=1, kind="PeerLost", message=f"rank 1 lost rank 2 in all_reduce #3: rank 2 raised Broken: {STORY}.",
    fields={"rank": 1, "peer": 2, "operation": "all_reduce #3"}, ended=10.5, closed=10.6, segments=set(), ports=[],
)  # fmt: skip


def test_the_judge_accepts_an_error_that_names_the_culprit():
    assert campaign.judge(LOST, RIGHT, fault_at=10.0) == []


@pytest.mark.parametrize(
    ("complaint", "changes"),
    [
        ("raised nothing", {"kind": ""}),
        ("TransportError, not PeerLost", {"kind": "TransportError"}),
        ("CollectiveMismatch, not PeerLost", {"kind": "CollectiveMismatch"}),
        (".peer is 0, not 2", {"fields": {"rank": 1, "peer": 0}}),
        (".rank is None, not 1", {"fields": {"rank": None, "peer": 2}}),
        ("the text does not name rank 2", {"message": f"rank 1 lost somebody: {STORY}."}),
        ("the text does not name rank 1", {"message": f"The first failure: rank 2 raised Broken: {STORY}."}),
        ("the text loses [0]", {"message": f"rank 1 lost rank 0: rank 0 lost rank 2: {STORY}."}),
        ("names a rank twice: 2, 2 and 2", {"message": f"rank 1 waited 3.0 s for ranks 2, 2 and 2: {STORY}."}),
        ("without the culprit's exception", {"message": "rank 1 lost rank 2: rank 2 died."}),
        ("20.0 s after the fault", {"ended": 30.0, "closed": 30.0}),
        ("took 9.5 s to close", {"closed": 20.0}),
        ("left behind thread murmura-x", {"left": ["thread murmura-x"]}),
    ],
)
def test_the_judge_refuses_anything_else(complaint, changes):
    wrong = campaign.judge(LOST, replace(RIGHT, **changes), fault_at=10.0)
    assert any(complaint in each for each in wrong), wrong


# The campaign


def sample(transport: str, num_cases: int) -> list[Case]:
    """The first cases of a transport in which nobody has to wait for a deadline."""
    cases = campaign.cases_of(1, 4 * num_cases, transport)
    return [case for case in cases if case.fault != "stop"][:num_cases]


@pytest.mark.parametrize("case", sample(THREADS, 12), ids=lambda case: case.id)
def test_survivors_name_the_rank_that_failed(case):
    verdict = campaign.run(case)
    assert verdict.is_right, campaign.describe(verdict)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_survivors_of_hundreds_of_faults_name_the_rank_that_failed():
    command = [sys.executable, str(Path(campaign.__file__)), "--seed", "0", "--cases", str(NUM_CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wrong = [block for block in ("\n" + done.stdout).split("\nok   ") if "WRONG" in block]
    assert done.returncode == 0, "\n".join([*wrong, done.stdout[-2000:], done.stderr[-2000:]])
