"""Run all checks, section by section; a section that fails or hangs becomes a finding."""

from __future__ import annotations

from collections.abc import Callable

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
from murmura.tools.doctor.findings import Diagnosis, Finding, Section
from murmura.tools.doctor.with_timeout import call_with_timeout, one_line

SECTION_SECONDS = 30.0


def run_checks(
    omp_num_threads: str | None,
    gloo_socket_ifname: str | None,
    nccl_socket_ifname: str | None = None,
    *,
    with_live: bool = True,
    on_step: Callable[[str], None] = lambda step: None,
) -> Diagnosis:
    """Check this machine; `on_step` gets the name of each section. `with_live` also runs worlds of a few ranks."""
    gpus = accelerators.AcceleratorFacts(torch_build="CPU")

    def check_accelerators() -> list[Finding]:
        nonlocal gpus
        gpus = accelerators.gather(nccl_socket_ifname or "")
        return accelerators.check(gpus)

    sections: dict[Section, Callable[[], list[Finding]]] = {
        Section.SOFTWARE: lambda: software.check(software.gather()),
        Section.PROCESSOR: lambda: processor.check(processor.gather(omp_num_threads)),
        Section.MEMORY: lambda: memory.check(memory.gather()),
        Section.SHARED_MEMORY: lambda: shared_memory.check(shared_memory.gather()),
        Section.NETWORK: lambda: network.check(network.gather(gloo_socket_ifname)),
        Section.ACCELERATORS: check_accelerators,
        Section.LEFTOVERS: lambda: leftovers.check(leftovers.gather()),
    }
    findings: list[Finding] = []
    for section, work in sections.items():
        on_step(section.replace("_", " "))
        findings += check_section(section, work)
    if with_live:
        probes = live_probes.choose(len(gpus.gpus), bool(gpus.nccl))
        findings += live_probes.run(probes, lambda title: on_step(f"a live all-reduce: {title}"))
    else:
        findings.append(Section.LIVE.note("not tried", "no all-reduce was run", "Run without --no-live to try."))
    return Diagnosis(tuple(findings))


def check_section(section: Section, work: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of `work`, or one finding that says why it failed."""
    tried = call_with_timeout(work, SECTION_SECONDS)
    if tried.value is not None:
        return tried.value
    fault = one_line(tried.fault or RuntimeError("it returned nothing"))
    return [
        section.warning(
            "could not be examined",
            fault,
            "The other sections are not affected. Report it with the output of murmura doctor --json -",
        )
    ]
