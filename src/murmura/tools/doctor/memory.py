"""Check memory: how much the machine has, is free, and the control group allows."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from murmura.tools.doctor.cgroups import read_limits
from murmura.tools.doctor.findings import Finding, Section, Status

LITTLE_BYTES = 2**30  # a rank with torch and a small model


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """How much memory there is for ranks."""

    total_bytes: int  # of the machine
    available_bytes: int  # what a new program can have without swapping
    limit_bytes: int | None = None  # what the control group allows; None is no limit


def gather() -> MemoryFacts:
    memory = psutil.virtual_memory()
    return MemoryFacts(
        total_bytes=memory.total, available_bytes=memory.available, limit_bytes=read_limits().memory_bytes
    )


def check(facts: MemoryFacts) -> list[Finding]:
    return [_judge_total(facts), _judge_limit(facts)]


def _judge_total(facts: MemoryFacts) -> Finding:
    title = f"{gib(facts.total_bytes)} of memory"
    detail = f"{gib(facts.available_bytes)} of it available"
    if facts.available_bytes >= LITTLE_BYTES:
        return Section.MEMORY.ok(title, detail)
    return Section.MEMORY.warning(
        f"only {gib(facts.available_bytes)} of memory available",
        f"of {gib(facts.total_bytes)}; the system kills a rank (SIGKILL) when there is none left",
        "End what else is running, or start fewer ranks.",
    )


def _judge_limit(facts: MemoryFacts) -> Finding:
    limit, total = facts.limit_bytes, facts.total_bytes
    if limit is None or limit >= total:
        return Section.MEMORY.ok("no limit on memory", "the control group allows all there is")
    little = limit < LITTLE_BYTES
    return Finding(
        Section.MEMORY,
        Status.WARNING if little else Status.NOTE,
        f"the control group allows {gib(limit)}",
        "all ranks of this machine together, and what they share; beyond that the system kills one of them (SIGKILL)",
        "Enough for the model, gradients and optimizer's state of every rank? If not, raise it: docker run --memory, "
        "resources.limits.memory in Kubernetes, the batch system's memory per node.",
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
