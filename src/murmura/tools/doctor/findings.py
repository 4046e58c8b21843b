"""What an examination finds, and its JSON form.

schema_version      1; grows when a field changes its meaning
status              the worst status of all findings
findings            in the order of the sections, each with
    section         one of `Section`
    status          one of `Status`
    title           what was looked at and how it is, in a few words
    detail          what was seen
    advice          what to do about it; empty if all is well
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

SCHEMA_VERSION = 1


class Status(StrEnum):
    """How bad it is, from the best to the worst."""

    OK = "ok"
    NOTE = "note"  # good to know
    WARNING = "warning"  # something will be slow, unsafe or refused
    BROKEN = "broken"  # something does not work at all


class Section(StrEnum):
    """What is looked at, in this order."""

    SOFTWARE = "software"
    PROCESSOR = "processor"
    MEMORY = "memory"
    SHARED_MEMORY = "shared_memory"
    NETWORK = "network"
    ACCELERATORS = "accelerators"
    LEFTOVERS = "leftovers"
    LIVE = "live"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; the module's docstring explains the fields."""

    section: Section
    status: Status
    title: str
    detail: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert bool(self.advice) == (self.status is not Status.OK), f"{self.title}: advice goes with what is not ok"


@dataclass(frozen=True)
class Diagnosis:
    """All that an examination found."""

    findings: tuple[Finding, ...]

    @property
    def status(self) -> Status:
        return worst(finding.status for finding in self.findings)

    def to_json(self) -> str:
        """As the module's docstring describes it."""
        fields = {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(fields, indent=2) + "\n"


def worst(statuses: Iterable[Status]) -> Status:
    """The worst of them; all is well if there is none."""
    order = list(Status)
    return max(statuses, key=order.index, default=Status.OK)
