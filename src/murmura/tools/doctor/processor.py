"""Check the cores that may be used, and the number of torch's threads."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from murmura.tools.doctor.cgroups import read_limits
from murmura.tools.doctor.findings import Finding, Section
from murmura.transports.host import num_cores


@dataclass(frozen=True, kw_only=True)
class ProcessorFacts:
    """Cores and threads, as this process has them."""

    cores: int  # of the machine
    usable: int  # those among them this process may run on
    quota: float | None = None  # how many cores' worth of time its control group allows; None is no limit
    torch_threads: int = 1  # how many threads torch computes with in this process
    omp_num_threads: str | None = None  # the variable of that name, if it is set


def gather(omp_num_threads: str | None = None) -> ProcessorFacts:
    cores = os.cpu_count() or 1
    return ProcessorFacts(
        cores=cores,
        usable=num_cores(),
        quota=read_limits().cpus,
        torch_threads=torch.get_num_threads(),
        omp_num_threads=omp_num_threads,
    )


def check(facts: ProcessorFacts) -> list[Finding]:
    return [_judge_cores(facts), _judge_threads(facts)]


def _judge_cores(facts: ProcessorFacts) -> Finding:
    visible = f"{facts.usable} of {facts.cores} cores" if facts.usable < facts.cores else _count(facts.cores, "core")
    if facts.quota is not None and facts.quota < facts.usable:
        whole = max(1, math.floor(facts.quota))
        return Section.PROCESSOR.warning(
            f"the time of only {facts.quota:g} cores",
            f"{visible} can be used, but the control group allows {facts.quota:g} cores' worth of time and stops all "
            "threads when it is spent. torch and run_world count cores, not time, and start too many threads.",
            f"Run with as many cores as you have time for: taskset -c 0-{whole - 1} ...; or raise the limit (docker "
            f"run --cpus, resources.limits.cpu in Kubernetes).",
        )
    if facts.usable == 1:
        return Section.PROCESSOR.note(
            visible,
            "ranks on this machine take turns on it",
            "Good for trying things out; several ranks are no faster than one here. Allow more cores if there are.",
        )
    if facts.usable < facts.cores:
        return Section.PROCESSOR.note(
            visible,
            "this process may not run on the others (taskset, a cpuset, or a batch system's allocation)",
            f"If you did not mean that, ask for more: taskset -c 0-{facts.cores - 1} ..., or the batch system's "
            "cores per task.",
        )
    return Section.PROCESSOR.ok(visible, "all can be used, all of the time")


def _judge_threads(facts: ProcessorFacts) -> Finding:
    threads = _count(facts.torch_threads, "thread")
    omp = facts.omp_num_threads
    said = "OMP_NUM_THREADS is not set" if omp is None else f"OMP_NUM_THREADS={omp}"
    if omp is not None and not _is_list(omp):
        return Section.PROCESSOR.warning(
            f"{said} is no number of threads",
            f"it is ignored, and torch computes with {threads}",
            "Set it to a whole number, or unset it.",
        )
    if facts.torch_threads > facts.usable:
        return Section.PROCESSOR.warning(
            f"torch computes with {threads} on {_count(facts.usable, 'core')}",
            f"{said}; threads that outnumber the cores wait for each other",
            f"Unset OMP_NUM_THREADS, or set it to the number of cores divided by the number of ranks; at most "
            f"{facts.usable}.",
        )
    if omp is not None and facts.torch_threads < facts.usable:
        return Section.PROCESSOR.note(
            f"torch computes with {threads} on {_count(facts.usable, 'core')}",
            f"{said} holds for every process that is started from here, but for the ranks of run_world, which get "
            "the number of cores divided by the number of ranks",
            "This is right if a launcher starts a rank for each core. Otherwise set it to cores divided by ranks.",
        )
    return Section.PROCESSOR.ok(f"torch computes with {threads}", said)


def _is_list(omp: str) -> bool:
    """Whether OpenMP accepts the value: one number, or one for each level of nesting, "4,2"."""
    return all(part.strip().isdecimal() and int(part) > 0 for part in omp.split(","))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
