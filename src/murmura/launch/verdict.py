"""Which of several failures is the one to show, and in which words: judged by how the ranks ended and what they said.

Ranks run as they are, so what is known of an exception is what Python printed of it on standard error.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

HEAD = "Traceback (most recent call last):"
LINKS = ("The above exception was the direct cause", "During handling of the above exception")
MAX_LINES = 60
CONSEQUENCES = {"PeerLost": 4, "TransportClosed": 3, "PeerTimeout": 3, "TransportError": 3, "CollectiveMismatch": 2}


@dataclass(frozen=True)
class End:
    """How a rank ended, in the order of `End`s; a negative status is a signal's number."""

    rank: int
    status: int
    errors: str  # the end of its standard error
    was_ended: bool = False  # by the launcher, because of another's failure


@dataclass(frozen=True)
class Failure:
    """A failure as it is shown: of a rank, or of a host's launcher. The less weight, the more to blame."""

    rank: int | None
    host: str
    status: int
    words: str
    weight: int
    is_gone: bool = False  # a launcher of which nothing has been heard

    @property
    def exit_status(self) -> int:
        """As a shell gives it."""
        return 128 - self.status if self.status < 0 else self.status

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank is not None else "the launcher"
        headline = f"{who} on {self.host} {'is gone' if self.is_gone else fate(self.status)}"
        return f"{headline}:\n{self.words}" if self.words else f"{headline}. It printed nothing on standard error."

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> Failure:
        """Raises ValueError for anything else."""
        told = json.loads(text)
        if not isinstance(told, dict) or not all(isinstance(told.get(name), int) for name in ("status", "weight")):
            raise ValueError("not a failure")
        rank = told.get("rank")
        return cls(
            rank if isinstance(rank, int) else None,
            str(told.get("host")),
            told["status"],
            str(told.get("words")),
            told["weight"],
            told.get("is_gone") is True,
        )


def fate(status: int) -> str:
    """In words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def judge(ends: Sequence[End], host_of: Callable[[int], str]) -> Failure | None:
    """The failure among `ends`, in the order they came, that explains the others; None if all went well.

    A signal comes before an exception, an exception before the complaints of those who waited in vain. A rank that
    was ended by the launcher counts if it was just failing: its last words are a traceback.
    """
    failures = []
    for end in ends:
        words = last_words(end.errors)
        raised = exception_name(words)
        if end.status == 0 or (end.was_ended and not raised):
            continue
        weight = CONSEQUENCES.get(raised, 1)
        if end.status < 0 and not end.was_ended:
            weight = 0
        failures.append(Failure(end.rank, host_of(end.rank), 1 if end.was_ended else end.status, words, weight))
    return gravest(failures)


def gravest(failures: Iterable[Failure]) -> Failure | None:
    """The first of those most to blame."""
    return min(failures, key=lambda failure: failure.weight, default=None)


def last_words(errors: str) -> str:
    """The traceback that `errors` ends with, with those that led to it; without one, its last lines."""
    lines = errors.rstrip().splitlines()
    heads = [number for number, line in enumerate(lines) if line == HEAD]
    if not heads:
        return "\n".join(lines[-MAX_LINES // 3 :])
    start = heads.pop()
    while heads and any(line.startswith(LINKS) for line in lines[heads[-1] : start]):
        start = heads.pop()
    shown = lines[start:]
    if len(shown) > MAX_LINES:
        shown = [*shown[: MAX_LINES // 3], "  ...", *shown[-MAX_LINES * 2 // 3 :]]
    return "\n".join(shown)


def exception_name(words: str) -> str:
    """The class of the exception whose traceback `words` is; empty if it is none."""
    if HEAD not in words:
        return ""
    after = words[words.rindex(HEAD) + len(HEAD) :].splitlines()[1:]
    raised = next((line for line in after if line and not line[0].isspace()), "")
    match = re.match(r"([\w.]+)(?::|$)", raised)
    return match[1].rpartition(".")[2] if match else ""
