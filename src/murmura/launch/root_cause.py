"""Choose, among the failures of several ranks, the root cause: the one that explains the others.

`murmura run` starts arbitrary commands, so all it knows of a rank's exception is the traceback on standard error;
`run_world` has the exception itself. Both order failures by the same priorities.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

CRASH_PRIORITY = 0
EXCEPTION_PRIORITY = 1
# Errors that another rank's failure causes: a lost peer is nearly always the consequence of something else.
CONSEQUENCE_PRIORITIES = {"CollectiveMismatch": 2, "TransportError": 3, "PeerTimeout": 3, "TransportClosed": 3}
CONSEQUENCE_PRIORITIES["PeerLost"] = 4
STOPPED_PRIORITY = 5  # a launcher that stopped its ranks because another host had failed

TRACEBACK_HEAD = "Traceback (most recent call last):"
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
MAX_LINES = 60


class Prioritized(Protocol):
    """A failure; the one with the lowest priority number is the root cause."""

    @property
    def priority(self) -> int: ...


F = TypeVar("F", bound=Prioritized)


def root_cause(failures: Iterable[F]) -> F | None:
    """Return the failure that explains the others, or None if there is none; of equals the first."""
    return min(failures, key=lambda failure: failure.priority, default=None)


def exception_priority(class_names: Iterable[str]) -> int:
    """Return the priority of an exception by its class name, followed by those of its base classes if known."""
    known = (CONSEQUENCE_PRIORITIES[name] for name in class_names if name in CONSEQUENCE_PRIORITIES)
    return next(known, EXCEPTION_PRIORITY)


@dataclass(frozen=True)
class RankExit:
    """How the process of a rank ended; a negative status is the number of a signal."""

    rank: int
    status: int
    errors: str  # the end of its standard error
    was_stopped: bool = False  # by the launcher, because another rank had failed


@dataclass(frozen=True)
class Failure:
    """A failure as it is shown, of a rank or of a host's launcher."""

    rank: int | None
    host: str
    status: int
    message: str
    priority: int
    is_lost: bool = False  # a launcher whose heartbeat stopped

    @property
    def exit_status(self) -> int:
        """The status as a shell reports it: 128 + n for signal n."""
        return 128 - self.status if self.status < 0 else self.status

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank is not None else "the launcher"
        headline = f"{who} on {self.host} {'is gone' if self.is_lost else describe_status(self.status)}"
        return f"{headline}:\n{self.message}" if self.message else f"{headline}. It printed nothing on standard error."

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Failure:
        """Parse what `to_json` returned; a ValueError for anything else."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or not all(
            isinstance(fields.get(name), int) for name in ("status", "priority")
        ):
            raise ValueError("not a failure")
        rank = fields.get("rank")
        return cls(
            rank if isinstance(rank, int) else None,
            str(fields.get("host")),
            fields["status"],
            str(fields.get("message")),
            fields["priority"],
            fields.get("is_lost") is True,
        )


def describe_status(status: int) -> str:
    """Say in words how a process with this exit status ended."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def find_failure(exits: Sequence[RankExit], host_of: Callable[[int], str]) -> Failure | None:
    """Return the root cause among `exits`, which are in the order of time; None if all ranks succeeded.

    A signal comes before an exception, and an exception before the errors of ranks that waited in vain. A rank that
    the launcher stopped counts only if it was failing itself: its output ends with a traceback.
    """
    failures = []
    for each in exits:
        message = error_excerpt(each.errors)
        raised = exception_name(message)
        if each.status == 0 or (each.was_stopped and not raised):
            continue
        crashed = each.status < 0 and not each.was_stopped
        priority = CRASH_PRIORITY if crashed else exception_priority([raised])
        status = 1 if each.was_stopped else each.status
        failures.append(Failure(each.rank, host_of(each.rank), status, message, priority))
    return root_cause(failures)


def error_excerpt(errors: str) -> str:
    """Return the traceback that `errors` ends with and those chained to it, or the last lines if there is none."""
    lines = errors.rstrip().splitlines()
    heads = [number for number, line in enumerate(lines) if line == TRACEBACK_HEAD]
    if not heads:
        return "\n".join(lines[-MAX_LINES // 3 :])
    start = heads.pop()
    while heads and any(line.startswith(CHAINED) for line in lines[heads[-1] : start]):
        start = heads.pop()
    shown = lines[start:]
    if len(shown) > MAX_LINES:
        shown = [*shown[: MAX_LINES // 3], "  ...", *shown[-MAX_LINES * 2 // 3 :]]
    return "\n".join(shown)


def exception_name(text: str) -> str:
    """Return the class name of the exception whose traceback `text` holds; empty if there is no traceback."""
    if TRACEBACK_HEAD not in text:
        return ""
    after = text[text.rindex(TRACEBACK_HEAD) + len(TRACEBACK_HEAD) :].splitlines()[1:]
    raised = next((line for line in after if line and not line[0].isspace()), "")
    match = re.match(r"([\w.]+)(?::|$)", raised)
    return match[1].rpartition(".")[2] if match else ""
