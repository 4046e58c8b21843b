"""What a rank must say about a fault: the right error, about the right rank, in time, with words that help."""

import re

from scenario import NUM_HEALTHY, Report

DEATH_SECONDS = 2.0  # a death is noticed in this time, whatever the deadline
SLACK_SECONDS = 1.0  # how late a deadline may strike on a busy machine
PROMPT_SECONDS = 5.0  # for what needs no clock at all, on a busy machine
AT_ONCE_SECONDS = 0.5


def expect_lost(report: Report, culprit: int, operation: str = "all_reduce", *, number: int | None = None) -> None:
    """The rank lost `culprit`, and says in which operation."""
    assert report.kind == "PeerLost", report
    assert "ConnectionError" in report.family
    assert "own output for the cause" in report.message
    assert report.message.endswith("start the world anew.")
    _expect_named(report, culprit, operation, number)


def expect_timeout(
    report: Report, culprit: int, timeout: float, operation: str = "all_reduce", *, number: int | None = None
) -> None:
    """The rank waited for `culprit` until its deadline and no longer."""
    assert report.kind == "PeerTimeout", report
    assert "TimeoutError" in report.family
    assert "raise the timeout" in report.message
    assert timeout <= report.waited < timeout + SLACK_SECONDS
    _expect_named(report, culprit, operation, number)


def expect_mismatch(report: Report, calls: dict[int, str]) -> None:
    """The rank raises the table of calls; each call of `calls` is there in so many words."""
    assert report.kind == "CollectiveMismatch", report
    assert sorted(report.calls) == sorted(calls)
    for rank, call in calls.items():
        assert call in report.calls[rank], report.calls
        assert f"rank {rank}: {report.calls[rank]}" in report.message
    assert report.message.startswith(f"rank {report.own}: ")
    assert "Every rank must call the same operations in the same order" in report.message
    _expect_poisoned(report)


def _expect_named(report: Report, culprit: int, operation: str, number: int | None) -> None:
    assert (report.rank, report.peer) == (report.own, culprit), report
    assert report.operation is not None
    if operation == "exchange":
        assert report.operation.startswith("exchange")
    else:
        named = re.fullmatch(rf"{operation} #(\d+)", report.operation)
        assert named, report.operation
        assert int(named[1]) > NUM_HEALTHY
        assert number is None or int(named[1]) == number
    assert re.search(rf"\brank {report.own}\b", report.message)
    assert re.search(rf"\brank {culprit}\b", report.message)
    assert report.operation in report.message
    _expect_poisoned(report)


def _expect_poisoned(report: Report) -> None:
    """Later calls raised at once, the same error again."""
    assert report.ports == ()
    assert report.later
    for again in report.later:
        assert (again.kind, again.peer) == (report.kind, report.peer), again
        assert again.seconds < AT_ONCE_SECONDS, again
