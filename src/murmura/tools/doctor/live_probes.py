"""Run an all-reduce on every transport that is available here, and check the result bit for bit.

Whatever goes wrong in it becomes a finding. While it lasts, what this process and its children write to standard
output and error is kept, and quoted if something fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from murmura import Transport, run_world
from murmura.tools.doctor.findings import Finding, Section
from murmura.tools.doctor.with_timeout import call_with_timeout, one_line
from murmura.tools.one_gpu import OneGPU
from murmura.transports.shared_memory import futex

TIMEOUT_SECONDS = 10.0  # of each wait
NCCL_TIMEOUT_SECONDS = 30.0  # its start is slow: it detects how the GPUs are connected
GRACE_SECONDS = 10.0  # beyond the deadline of the waits, for a world to report its own error
START_SECONDS = 60.0  # for the first process: it imports torch, maybe from a slow disk
LENGTHS = (1024, 256 * 1024 + 3)  # float32: one message below the size of a chunk, one above
NUM_ROUNDS = 5
SLOW_SECONDS = 0.25
QUOTED_LINES = 3
ONE_GPU = "one_gpu"  # a kind of world beside those of run_world


@dataclass(frozen=True)
class Probe:
    """A world to run; `advice` is shown if it fails."""

    title: str
    num_ranks: int
    kind: str
    transport: str | None
    advice: str
    on_cuda: bool = False
    timeout: float = TIMEOUT_SECONDS


@dataclass(frozen=True)
class Trial:
    """The result of one rank: the lengths with a wrong sum, and the best time of each length."""

    wrong: tuple[int, ...]
    seconds: tuple[float, ...]


THREADS = Probe(
    "threads",
    4,
    "threads",
    None,
    "Threads need no support of the system, so this is a fault of murmura or torch: report it with the output of "
    "murmura doctor --json -.",
)
SHARED_MEMORY = Probe(
    "processes over shared memory",
    2,
    "processes",
    "shared_memory",
    "The section on shared memory says what the kernel refuses. Until then: threads, or transport='gloo'.",
)
GLOO = Probe(
    "processes over Gloo",
    2,
    "processes",
    "gloo",
    "Gloo connects the ranks of one host over 127.0.0.1: see that loopback is up, and that no firewall or sandbox "
    "forbids it. Until then: shared memory, or threads.",
)


def nccl(num_gpus: int) -> Probe:
    """Two ranks that share the only GPU, each told of a host of its own; else a rank on each GPU."""
    return Probe(
        "processes over NCCL" if num_gpus > 1 else "processes over NCCL that share the GPU, over loopback sockets",
        max(2, num_gpus),
        "processes" if num_gpus > 1 else ONE_GPU,
        "nccl",
        "NCCL_DEBUG=INFO makes NCCL say what it does; nvidia-smi shows whether the GPUs are free. Until then: shared "
        "memory, or threads.",
        on_cuda=True,
        timeout=NCCL_TIMEOUT_SECONDS,
    )


def choose(num_gpus: int, has_nccl: bool) -> list[Probe]:
    """Return the probes for this machine."""
    probes = [THREADS]
    if futex.is_supported():
        probes.append(SHARED_MEMORY)
    probes.append(GLOO)
    if num_gpus and has_nccl:
        probes.append(nccl(num_gpus))
    return probes


def run(probes: Sequence[Probe], on_probe: Callable[[str], None] = lambda title: None) -> list[Finding]:
    """Run the probes one after another; `on_probe` gets the title of each before it starts."""
    findings: list[Finding] = []
    with output_kept() as said:
        for index, probe in enumerate(probes):
            on_probe(probe.title)
            first_process = probe.kind == "processes" and all(each.kind != "processes" for each in probes[:index])
            findings.append(try_out(probe, START_SECONDS if first_process else 0.0, said))
    return findings


def try_out(probe: Probe, start_seconds: float, said: Callable[[], str]) -> Finding:
    """Start the world of `probe`, sum in it and stop it; `said` returns what was printed meanwhile."""
    said()

    def work() -> list[Trial]:
        if probe.kind == ONE_GPU:
            with OneGPU(probe.num_ranks, timeout=probe.timeout) as gpu:
                return gpu.run(exercise, probe.on_cuda, limit=start_seconds + probe.timeout)
        return run_world(
            exercise, probe.num_ranks, probe.on_cuda, kind=probe.kind, transport=probe.transport, timeout=probe.timeout
        )

    start_seconds += START_SECONDS if probe.kind == ONE_GPU else 0.0
    tried = call_with_timeout(work, start_seconds + probe.timeout + GRACE_SECONDS)
    if tried.fault is not None or tried.value is None:
        fault = one_line(tried.fault or RuntimeError("it returned nothing"))
        return judge_fault(probe, fault, said())
    return check(probe, tried.value, tried.seconds)


def exercise(transport: Transport, on_cuda: bool) -> Trial:
    """Run on each rank: sums with known results, several times."""
    device = "cuda" if on_cuda else "cpu"
    size = transport.world_size
    wrong, best = [], []
    for length in LENGTHS:
        base = torch.arange(length, dtype=torch.float32, device=device)
        expected = size * base + size * (size - 1) / 2  # integers below 2**24, so exact in any order
        seconds = []
        for _ in range(NUM_ROUNDS):
            tensor = base + transport.rank
            transport.barrier()
            began = time.perf_counter()
            transport.all_reduce(tensor)
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            if not torch.equal(tensor, expected) and length not in wrong:
                wrong.append(length)
        best.append(min(seconds))
    return Trial(tuple(wrong), tuple(best))


def check(probe: Probe, trials: Sequence[Trial], total_seconds: float) -> Finding:
    """Turn the trials of all ranks into a finding; `total_seconds` includes start and end."""
    ranks = f"{probe.num_ranks} rank{'' if probe.num_ranks == 1 else 's'}"
    title = f"{probe.title}, {ranks}"
    wrong = [f"rank {rank}: {list(trial.wrong)}" for rank, trial in enumerate(trials) if trial.wrong]
    if wrong:
        return Section.LIVE.broken(
            f"{title}: wrong sums",
            f"lengths whose sum was wrong: {'; '.join(wrong)}",
            "Do not train with it. Report the output of murmura doctor --json -, and test the memory of the machine.",
        )
    slowest = [max(trial.seconds[index] for trial in trials) for index in range(len(LENGTHS))]
    times = ", ".join(
        f"{length * 4 // 1024} KiB in {_milliseconds(each)}" for length, each in zip(LENGTHS, slowest, strict=True)
    )
    detail = f"every sum right to the bit; {times}; {total_seconds:.1f} s with start and end"
    if slowest[0] > SLOW_SECONDS:
        return Section.LIVE.warning(
            f"{title}: slow",
            detail,
            "Is the machine busy, or its processor time limited? See under processor, and try again when it is idle.",
        )
    return Section.LIVE.ok(title, detail)


def judge_fault(probe: Probe, fault: str, said: str) -> Finding:
    """Turn a failed probe into a finding; `said` is what its world printed."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    quote = f" Its last words: {' / '.join(lines[-QUOTED_LINES:])}" if lines else ""
    return Section.LIVE.broken(f"{probe.title}: failed", fault + quote, probe.advice)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


@contextlib.contextmanager
def output_kept() -> Iterator[Callable[[], str]]:
    """Capture what is written to descriptors 1 and 2; the yielded function returns what is new since its last call.

    Processes started meanwhile inherit the descriptors, so that ranks print nothing into the JSON output.
    """
    with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
        for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
            with contextlib.suppress(OSError, AttributeError):  # closed (None, says Python): nobody can write to it
                stream.flush()
                saved = os.dup(fd)
                os.dup2(file.fileno(), fd)
                stack.callback(_restore, saved, fd)

        read = 0

        def said() -> str:
            nonlocal read
            size = os.fstat(file.fileno()).st_size
            new = os.pread(file.fileno(), size - read, read)
            read = size
            return new.decode(errors="replace")

        yield said


def _restore(saved: int, fd: int) -> None:
    os.dup2(saved, fd)
    os.close(saved)
