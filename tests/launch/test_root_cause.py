"""Of several failures the root cause is shown, whichever rank ended first."""

from __future__ import annotations

import signal

import pytest

from murmura.errors import CollectiveMismatch, PeerLost, PeerTimeout, RendezvousError
from murmura.launch.outcomes import Outcome
from murmura.launch.root_cause import Failure, RankExit, error_excerpt, exception_name, find_failure, root_cause

VALUE_ERROR = """some warning
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    raise ValueError("no good")
ValueError: no good
"""
PEER_LOST = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
murmura.errors.PeerLost: rank 0 lost rank 1 in barrier #2.
Look at rank 1.
"""
CHAIN = f"""{PEER_LOST}
The above exception was the direct cause of the following exception:

{VALUE_ERROR.partition(chr(10))[2]}"""
HANDLED = f"{VALUE_ERROR}epoch 3\n"


def shown(*ends: RankExit) -> Failure:
    failure = find_failure(ends, lambda rank: f"node{rank}")
    assert failure is not None
    return failure


def test_all_went_well() -> None:
    assert find_failure([RankExit(0, 0, HANDLED), RankExit(1, 0, "")], str) is None


@pytest.mark.parametrize("first", [True, False])
def test_an_exception_comes_before_the_complaints_of_those_who_waited(first: bool) -> None:
    ends = [RankExit(1, 1, VALUE_ERROR), RankExit(0, 1, PEER_LOST)]
    assert shown(*(ends if first else reversed(ends))).rank == 1


@pytest.mark.parametrize("is_reversed", [False, True])
def test_exceptions_and_their_tracebacks_are_ordered_alike(is_reversed: bool) -> None:
    errors = [ValueError("no good"), CollectiveMismatch("a and b"), PeerTimeout("late"), PeerLost("lost")]
    for number in range(len(errors)):
        left = list(enumerate(errors))[number:]
        left = left[::-1] if is_reversed else left
        raised = root_cause([Outcome(rank, error=error) for rank, error in left])
        text = "Traceback (most recent call last):\n  File\nmurmura.errors.{}: text\n"
        printed = shown(*(RankExit(rank, 1, text.format(type(error).__name__)) for rank, error in left))
        assert raised is not None
        assert (raised.rank, printed.rank) == (number, number)
    crashed = Outcome(2, error=PeerLost("killed"), crashed=True)
    assert root_cause([Outcome(0, error=RendezvousError("alone")), crashed]) is crashed


def test_a_signal_comes_before_an_exception() -> None:
    failure = shown(RankExit(0, 1, VALUE_ERROR), RankExit(2, -signal.SIGSEGV, ""))
    assert (failure.rank, failure.exit_status) == (2, 128 + signal.SIGSEGV)
    assert str(failure) == "rank 2 on node2 was killed by SIGSEGV. It printed nothing on standard error."


def test_a_rank_that_was_ended_while_it_failed_counts_and_one_at_work_does_not() -> None:
    complaint = RankExit(0, 1, PEER_LOST)
    failure = shown(complaint, RankExit(1, -signal.SIGTERM, VALUE_ERROR, was_stopped=True))
    assert (failure.rank, failure.exit_status) == (1, 1)
    assert shown(complaint, RankExit(1, -signal.SIGTERM, "epoch 3\n", was_stopped=True)).rank == 0


def test_of_equals_the_first_is_shown_with_its_status_and_words() -> None:
    failure = shown(RankExit(3, 7, "cannot open data\n"), RankExit(1, 1, VALUE_ERROR))
    assert str(failure) == "rank 3 on node3 exited with status 7:\ncannot open data"
    assert failure.exit_status == 7


def test_a_traceback_is_shown_whole_with_those_that_led_to_it_and_nothing_before() -> None:
    assert error_excerpt(VALUE_ERROR) == VALUE_ERROR.partition("\n")[2].rstrip()
    assert error_excerpt(HANDLED + CHAIN) == CHAIN.rstrip()
    assert exception_name(CHAIN) == "ValueError"
    assert exception_name(PEER_LOST) == "PeerLost"
    assert exception_name("no traceback: at all") == ""


def test_long_words_are_shortened_in_the_middle() -> None:
    lines = error_excerpt(
        "Traceback (most recent call last):\n" + "  deep\n" * 500 + "RecursionError: deep"
    ).splitlines()
    assert len(lines) < 70
    assert lines[-1] == "RecursionError: deep"


def test_a_failure_travels_as_json_and_anything_else_is_refused() -> None:
    failure = shown(RankExit(3, 7, "words"))
    assert Failure.from_json(failure.to_json()) == failure
    for text in ("[]", "1", '{"status": "x", "priority": 1}', "nonsense"):
        with pytest.raises(ValueError):
            Failure.from_json(text)
    assert root_cause([]) is None
