"""Compare which algorithm reaches a loss first on which link, and how many bytes it sends.

`run_comparison` starts the ranks, a world for each link, and reads what they left; the rest is arithmetic on `Run`s.
The JSON form has the fields of `Row` and `Comparison`, and "schema_version": 3.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from murmura import Algorithm, UsageError
from murmura.algorithms import algorithm_named
from murmura.algorithms.base import Parameters
from murmura.tools import ranks
from murmura.tools.experiments.breakdown import Breakdown, readable_bytes, slowest_turns
from murmura.tools.experiments.compare_rank import compare_as_rank, described, run_path
from murmura.tools.experiments.compare_spec import BASELINE, LOCAL, TORCH_DDP, ComparisonSpec
from murmura.tools.experiments.machine import Machine
from murmura.tools.experiments.runs import Run
from murmura.tools.lab import Hosts
from murmura.tools.one_gpu import OneGPU
from murmura.tools.options import typed_command
from murmura.tools.progress import PROGRESS, Tell, silent, watching
from murmura.transports.decorators.throttled import parse_rate

STEP_SECONDS = 60.0  # per step of all contestants; a world that takes longer is considered hung
SOUND = 1.1  # times the loss of plain all-reduce: a contestant that ends above it has not learnt as well
APART = 1.25  # the ratio of predicted step times below which their order is not checked
CLOSE = 1.1  # times the seconds of the best: one run does not show which of two is quicker below that
SCHEMA_VERSION = 3


@dataclass(frozen=True)
class Row:
    """One contestant on one link."""

    link: str
    contestant: str
    steps_to_target: int | None  # to the first evaluation at or below the target; None if there is none
    seconds_to_target: float | None  # the same in seconds
    step_ms: float  # of the slowest rank; the median over turns of `spec.block_steps` steps
    compute_ms: float | None  # the part of a step in which a rank does not wait; unknown for torch's DDP
    step_bytes: float  # sent by a rank in a step: as the link counted, else by the operations called
    formula_bytes: float  # the same by the algorithm's formula
    final_loss: float
    consensus_distance: float


@dataclass(frozen=True)
class Comparison:
    """A finished comparison."""

    spec: ComparisonSpec
    date: str
    machine: Machine
    target: float
    num_parameters: int
    configurations: dict[str, str]  # by contestant, what its name means
    notes: dict[str, str]  # by link, how it was made, and who is missing for that
    rows: tuple[Row, ...]
    recommendations: dict[str, str]  # by link, a sentence that says which algorithm to use there, and why

    def of_link(self, link: str) -> list[Row]:
        return [row for row in self.rows if row.link == link]

    def to_json(self) -> str:
        fields = {"benchmark": "compare", "schema_version": SCHEMA_VERSION, "command": typed_command()}
        return json.dumps({**fields, **asdict(self)}, indent=2) + "\n"


def run_comparison(spec: ComparisonSpec, folder: Path, on_progress: Tell = silent) -> tuple[Comparison, list[Run]]:
    """Run the comparison; every contestant writes a run folder into `folder`. `on_progress` is called from a thread."""
    notes = {}
    with watching(folder / PROGRESS, on_progress):
        for link in spec.links:
            notes[link] = _run_link(spec, link, folder.absolute())
    for leftover in [folder / PROGRESS, *folder.glob(".store-*")]:
        leftover.unlink(missing_ok=True)
    paths = [run_path(folder, link, name) for link in notes for name in (TORCH_DDP, *spec.algorithms)]
    runs = [Run.read(path) for path in paths if path.is_dir()]  # torch's DDP is not on every link
    return compared(spec, runs, notes), runs


def _run_link(spec: ComparisonSpec, link: str, folder: Path) -> str:
    """Run the world of `link` and return how the link was made."""
    what = f"the comparison on {link}"
    if spec.device == "cuda":
        seconds = STEP_SECONDS * spec.num_steps * (len(spec.algorithms) + 1)
        with OneGPU(spec.ranks, timeout=ranks.WAIT_SECONDS) as gpu:
            gpu.run(compare_as_rank, spec, link, folder, False, limit=seconds)
        throttled = "" if link == LOCAL else "; ThrottledTransport, so torch's DDP is not compared"
        return f"NCCL, {gpu.label}{throttled}"
    if link == LOCAL:
        ranks.run_here(what, compare_as_rank, spec.ranks, spec, link, folder, False)
        return "shared memory; torch's DDP on Gloo over loopback"
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(spec.ranks, link))
        except UsageError as error:
            ranks.run_here(what, compare_as_rank, spec.ranks, spec, link, folder, False)
            return f"ThrottledTransport, so torch's DDP is not compared. ({error})"
        call = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="murmura-compare-")))
        command = ranks.command(call, compare_as_rank, spec, link, folder, True)
        variables = {"MURMURA_TRANSPORT": "gloo", "MURMURA_TIMEOUT": f"{ranks.WAIT_SECONDS:g}", "OMP_NUM_THREADS": "1"}
        seconds = STEP_SECONDS * spec.num_steps * (len(spec.algorithms) + 1)
        hosts.run(command, env=variables, capture=True, timeout=seconds)
    return "Gloo between hosts in network namespaces"


# Evaluating the runs


def compared(spec: ComparisonSpec, runs: Sequence[Run], notes: dict[str, str]) -> Comparison:
    """Return the comparison of runs that were just made on this machine."""
    target = spec.target if spec.target is not None else common_target(runs)
    num_parameters = runs[0].result["num_parameters"]
    rows = tuple(row_of(run, target, run.result.get("shapes", num_parameters)) for run in runs)
    recommendations = {
        link: recommendation([row for row in rows if row.link == link], spec, target, num_parameters)
        for link in spec.links
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    about = {row.contestant: described(row.contestant, spec.num_steps, spec.device) for row in rows}
    return Comparison(spec, date, Machine.here(), target, num_parameters, about, notes, rows, recommendations)


def common_target(runs: Sequence[Run]) -> float:
    """Return a loss reached by all that learn about as well as plain all-reduce, or as the best if that is missing."""
    finals = {(run.settings["algorithm"]): run.result["loss"] for run in runs}
    plain = finals.get(BASELINE, finals.get(TORCH_DDP, min(finals.values())))
    return float(max(run.result["loss"] for run in runs if run.result["loss"] <= SOUND * plain))


def row_of(run: Run, target: float, parameters: Parameters) -> Row:
    name, num_ranks = run.settings["algorithm"], run.num_ranks
    turns = slowest_turns(run.records, run.turn_steps)
    reached: int | None = None
    for step, loss in evaluations(run):
        if loss <= target:
            reached = step
            break
    measured = run.result.get("wire_bytes_per_step")
    by_rank = [Breakdown.of(records, num_ranks, turn_steps=run.turn_steps) for records in run.records.values()]
    return Row(
        link=run.settings["bandwidth"] or LOCAL,
        contestant=name,
        steps_to_target=reached,
        seconds_to_target=None if reached is None else sum(turns[: reached // run.turn_steps]) * run.turn_steps / 1000,
        step_ms=statistics.median(turns),
        compute_ms=None if name == TORCH_DDP else statistics.fmean(each.compute_ms for each in by_rank),
        step_bytes=statistics.fmean(each.step_bytes for each in by_rank) if measured is None else measured,
        formula_bytes=formula_bytes(name, parameters, num_ranks),
        final_loss=run.result["loss"],
        consensus_distance=run.result["consensus_distance"],
    )


def formula_bytes(contestant: str, parameters: Parameters, num_ranks: int) -> float:
    """Return the bytes that a rank sends in most steps: for QAdam those after its warm-up."""
    return _algorithm(contestant).bytes_per_round(parameters, num_ranks)


def _algorithm(contestant: str) -> Algorithm:
    return algorithm_named(BASELINE if contestant == TORCH_DDP else contestant)


def evaluations(run: Run) -> list[tuple[int, float]]:
    """Return pairs of steps done and held-out loss."""
    return [(each.step + 1, each.logged["held_out"]) for each in run.records[0] if "held_out" in each.logged]


def predicted_ms(row: Row, compute_ms: float) -> tuple[float, float]:
    """Return bounds of the predicted step time: computing, and sending the bytes over the link.

    Both are the same but for algorithms whose exchange travels while the next gradients are computed: how much of it
    that hides is left open.
    """
    link_ms = 0.0 if row.link == LOCAL else row.formula_bytes / parse_rate(row.link) * 1000
    hides = _algorithm(row.contestant).hides_exchange
    total_ms = compute_ms + link_ms
    return (max(compute_ms, link_ms) if hides else total_ms), total_ms


def contradictions(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return pairs on one link whose measured step times contradict clearly different predictions."""
    compute_ms = statistics.median(row.compute_ms for row in rows if row.compute_ms is not None)
    wrong = []
    for one, other in itertools.permutations(rows, 2):
        _, at_most = predicted_ms(one, compute_ms)
        at_least, _ = predicted_ms(other, compute_ms)
        if at_most * APART < at_least and one.step_ms > other.step_ms:
            wrong.append((one, other))
    return wrong


def recommendation(rows: Sequence[Row], spec: ComparisonSpec, target: float, num_parameters: int) -> str:
    """Say which algorithm to use on this link, and why."""
    own = [row for row in rows if row.contestant != TORCH_DDP]
    link = "within this machine" if own[0].link == LOCAL else f"at {own[0].link}"
    what = f"For {spec.task} ({num_parameters / 1e6:.2g} M parameters) with {spec.ranks} ranks {link}"
    arrived = [row for row in rows if row.seconds_to_target is not None]
    torchs = next((row for row in arrived if row.contestant == TORCH_DDP), None)
    if all(row is torchs for row in arrived):
        nobody = f"nobody but {TORCH_DDP}" if torchs else "nobody"
        return f"{what} {nobody} reached a loss of {target:.3f} in {spec.num_steps} steps: take more steps."
    best = min((row for row in arrived if row is not torchs), key=_seconds)
    said = f"{what} use {best.contestant}: it reached a loss of {target:.3f} in {_readable_seconds(best)}"
    others = [row for row in arrived if row is not torchs]
    if torchs is None or _seconds(torchs) >= _seconds(best):
        return f"{said}{_beside(best, rows, arrived, spec)}.{_close(best, others)}"
    said = f"{said}{_beside(best, rows, others, spec)}.{_close(best, others)}"
    return f"{said} {TORCH_DDP} was quicker: {_readable_seconds(torchs)}."


def _close(best: Row, others: Sequence[Row]) -> str:
    """Name the contestants of `others` that may be as quick as `best`."""
    close = [row.contestant for row in others if row is not best and _seconds(row) <= CLOSE * _seconds(best)]
    if not close:
        return ""
    return f" This run does not tell it from {' or '.join(close)}, which took at most {CLOSE - 1:.0%} longer."


def _seconds(row: Row) -> float:
    return row.seconds_to_target or 0.0


def _readable_seconds(row: Row) -> str:
    """Two digits of a time below a second, or times of short runs would look alike."""
    seconds = _seconds(row)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"


def _readable_ms(row: Row) -> str:
    return f"{row.step_ms:.{0 if row.step_ms >= 10 else 1}f}"


def _beside(best: Row, rows: Sequence[Row], arrived: Sequence[Row], spec: ComparisonSpec) -> str:
    """Return why `best` is the best: beside plain all-reduce or, if it is that itself, beside the next of `arrived`."""
    plain = next((row for row in rows if row.contestant == BASELINE), None)
    if plain is None or plain is best:
        others = [row for row in arrived if row is not best]
        if not others:
            return f", and no other algorithm did in {spec.num_steps} steps"
        next_best = min(others, key=_seconds)
        return (
            f", {next_best.contestant} in {_readable_seconds(next_best)}; it takes {_readable_ms(best)} ms a "
            f"step and {best.steps_to_target} steps, the other {_readable_ms(next_best)} ms and "
            f"{next_best.steps_to_target} steps"
        )
    sends = (
        f"a step sends {readable_bytes(best.step_bytes)} instead of {readable_bytes(plain.step_bytes)} and takes "
        f"{_readable_ms(best)} instead of {_readable_ms(plain)} ms"
    )
    if plain.seconds_to_target is None:
        return f", which {BASELINE} did not reach in {spec.num_steps} steps; {sends}"
    return f", {BASELINE} in {_readable_seconds(plain)}, because {sends}"
