"""Random faults in training, judged by `campaign`: a sample of them here, hundreds in the long run."""

import subprocess
import sys
from pathlib import Path

import campaign
import pytest
from campaign_cases import ALGORITHMS, FAULTS, MOMENTS, THREADS, TRANSPORTS, Case

NUM_CASES = 324  # nine times every transport with every algorithm


def test_any_36_cases_have_every_transport_with_every_algorithm():
    for first in (0, 36, 72):
        cases = [campaign.case_of(7, number) for number in range(first, first + 36)]
        assert len({(case.transport, case.algorithm) for case in cases}) == len(TRANSPORTS) * len(ALGORITHMS)


def test_the_campaign_has_every_moment_and_every_fault():
    cases = campaign.cases_of(0, NUM_CASES)
    assert {case.moment for case in cases} == set(MOMENTS)
    assert {(case.transport, case.fault) for case in cases} == {
        (transport, fault) for transport, faults in FAULTS.items() for fault in faults
    }


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
