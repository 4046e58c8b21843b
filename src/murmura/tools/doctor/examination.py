"""The whole examination, section by section; a section that fails is a finding itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from murmura.tools.doctor import (
    accelerators,
    leftovers,
    live_probes,
    memory,
    network,
    processor,
    shared_memory,
    software,
)
from murmura.tools.doctor.attempts import attempt, in_words
from murmura.tools.doctor.findings import Diagnosis, Finding, Section, Status

SECTION_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Hints:
    """Settings of other libraries that change what is found."""

    omp_num_threads: str | None = None
    gloo_socket_ifname: str | None = None


def examine(
    hints: Hints | None = None, *, with_live: bool = True, on_step: Callable[[str], None] = lambda step: None
) -> Diagnosis:
    """Examine this machine; `on_step` is told, in words, what comes next. `with_live` runs worlds of a few ranks."""
    hints = hints or Hints()
    gpus = accelerators.AcceleratorFacts(torch_build="CPU")

    def examine_accelerators() -> list[Finding]:
        nonlocal gpus
        gpus = accelerators.gather()
        return accelerators.judge(gpus)

    sections: dict[Section, Callable[[], list[Finding]]] = {
        Section.SOFTWARE: lambda: software.judge(software.gather()),
        Section.PROCESSOR: lambda: processor.judge(processor.gather(hints.omp_num_threads)),
        Section.MEMORY: lambda: memory.judge(memory.gather()),
        Section.SHARED_MEMORY: lambda: shared_memory.judge(shared_memory.gather()),
        Section.NETWORK: lambda: network.judge(network.gather(hints.gloo_socket_ifname)),
        Section.ACCELERATORS: examine_accelerators,
        Section.LEFTOVERS: lambda: leftovers.judge(leftovers.gather()),
    }
    findings: list[Finding] = []
    for section, work in sections.items():
        on_step(section.replace("_", " "))
        findings += examine_section(section, work)
    if with_live:
        probes = live_probes.choose(len(gpus.gpus), bool(gpus.nccl))
        findings += live_probes.run(probes, lambda title: on_step(f"a live all-reduce: {title}"))
    else:
        findings.append(
            Finding(Section.LIVE, Status.NOTE, "not tried", "no all-reduce was run", "Leave --no-live away to try.")
        )
    return Diagnosis(tuple(findings))


def examine_section(section: Section, work: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of `work`, or one that says why there are none."""
    tried = attempt(work, SECTION_SECONDS)
    if tried.value is not None:
        return tried.value
    fault = in_words(tried.fault or RuntimeError("it returned nothing"))
    return [
        Finding(
            section,
            Status.WARNING,
            "could not be examined",
            fault,
            "The other sections are not concerned. Report it with the output of murmura doctor --json -",
        )
    ]
