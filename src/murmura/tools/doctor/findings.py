"""The findings of `murmura doctor`, and their JSON form.

schema_version      1; grows when a field changes its meaning
status              the worst status of all findings
findings            in the order of the sections, each with
    section         one of `Section`
    status          one of `Status`
    title           what was checked and its state, in a few words
    detail          what was found
    advice          what to do about it; empty if the status is ok
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

SCHEMA_VERSION = 1


class Status(StrEnum):
    """The severity of a finding, from the best to the worst."""

    OK = "ok"
    NOTE = "note"  # good to know
    WARNING = "warning"  # something will be slow, unsafe or refused
    BROKEN = "broken"  # something does not work at all


class Section(StrEnum):
    """The sections, in the order in which they are checked."""

    SOFTWARE = "software"
    PROCESSOR = "processor"
    MEMORY = "memory"
    SHARED_MEMORY = "shared_memory"
    NETWORK = "network"
    ACCELERATORS = "accelerators"
    LEFTOVERS = "leftovers"
    LIVE = "live"

    def ok(self, title: str, detail: str) -> Finding:
        return Finding(self, Status.OK, title, detail)

    def note(self, title: str, detail: str, advice: str) -> Finding:
        return Finding(self, Status.NOTE, title, detail, advice)

    def warning(self, title: str, detail: str, advice: str) -> Finding:
        return Finding(self, Status.WARNING, title, detail, advice)

    def broken(self, title: str, detail: str, advice: str) -> Finding:
        return Finding(self, Status.BROKEN, title, detail, advice)


@dataclass(frozen=True)
class Finding:
    """The result of one check; the module's docstring explains the fields."""

    section: Section
    status: Status
    title: str
    detail: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert bool(self.advice) == (self.status is not Status.OK), f"{self.title}: advice goes with what is not ok"


@dataclass(frozen=True)
class Diagnosis:
    """The findings of all checks."""

    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        return worst(finding.status for finding in self.findings)

    def to_json(self) -> str:
        """Return the JSON form that the module's docstring describes."""
        fields = {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(fields, indent=2) + "\n"


def worst(statuses: Iterable[Status]) -> Status:
    """Return the worst status, or OK if there is none."""
    order = list(Status)
    return max(statuses, key=order.index, default=Status.OK)
