"""The comparison: which way of synchronising reaches a loss first, on which link, and what it sends for that.

`run_comparison` starts the ranks, a world for each link, and reads what they left; the rest is arithmetic on `Run`s.
The JSON form has the fields of `Row` and `Comparison`, and "schema_version": 1.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from murmura import MurmuraError, UsageError, run_world
from murmura.benchmarks.compare_rank import PROGRESS, compare_as_rank, run_path
from murmura.benchmarks.compare_spec import BASELINE, BLOCK_STEPS, LOCAL, TORCH_DDP, ComparisonSpec
from murmura.benchmarks.progress import Progress, silent, watching
from murmura.benchmarks.report import Machine
from murmura.experiments.breakdown import Breakdown, readable_bytes
from murmura.experiments.recipes import recipe_named
from murmura.experiments.runs import Run
from murmura.experiments.traffic import bytes_per_step
from murmura.lab import Hosts
from murmura.transports.decorators.throttled import parse_rate

WAIT_SECONDS = 120.0  # the deadline of each wait of a rank for another
STEP_SECONDS = 60.0  # a world that takes longer than this for a step of each contestant is stuck
SOUND = 1.1  # times the loss of plain all-reduce: who ends above has not learnt as well
HIDING = ("decentralized", "shift_one", "async")
APART = 1.25  # times: predicted step times closer than this may come in any order
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One contestant on one link.

    Attributes:
        steps_to_target, seconds_to_target: to the first evaluation at or below the target; None if there is none.
        step_ms: of the slowest rank; the median over turns of a few steps.
        compute_ms: the part of a step in which a rank does not wait; None for torch's DDP, of which it is not known.
        step_bytes: what a rank sends in a step: as the link counted where it can, else from the operations called.
        formula_bytes: the same by the algorithm's formula.
    """

    link: str
    contestant: str
    steps_to_target: int | None
    seconds_to_target: float | None
    step_ms: float
    compute_ms: float | None
    step_bytes: float
    formula_bytes: float
    final_loss: float
    consensus_distance: float


@dataclass(frozen=True)
class Comparison:
    """A finished comparison.

    Attributes:
        notes: by link, how it was made, and who is missing for that.
        verdicts: by link, a sentence that says which algorithm to use there, and why.
    """

    spec: ComparisonSpec
    date: str
    machine: Machine
    target: float
    num_parameters: int
    notes: dict[str, str]
    rows: tuple[Row, ...]
    verdicts: dict[str, str]

    def of_link(self, link: str) -> list[Row]:
        return [row for row in self.rows if row.link == link]

    def to_json(self) -> str:
        fields = {"benchmark": "compare", "schema_version": SCHEMA_VERSION, "command": self.spec.command()}
        return json.dumps({**fields, **asdict(self)}, indent=2) + "\n"


def run_comparison(
    spec: ComparisonSpec, folder: Path, on_progress: Callable[[Progress], None] = silent
) -> tuple[Comparison, list[Run]]:
    """Carry out `spec`; every contestant leaves a run folder in `folder`. `on_progress` is called from a thread."""
    spec.write(folder)
    notes = {}
    with watching(folder / PROGRESS, on_progress):
        for link in spec.links:
            notes[link] = _run_link(spec, link, folder)
    for leftover in [folder / PROGRESS, *folder.glob(".meeting-*")]:
        leftover.unlink(missing_ok=True)
    names = {link: [name for name in (TORCH_DDP, *spec.algorithms) if _took_part(folder, link, name)] for link in notes}
    runs = [Run.read(run_path(folder, link, name)) for link in notes for name in names[link]]
    return compared(spec, runs, notes), runs


def _took_part(folder: Path, link: str, name: str) -> bool:
    return run_path(folder, link, name).is_dir()


def _run_link(spec: ComparisonSpec, link: str, folder: Path) -> str:
    """Run the world of `link`; returns how the link was made."""
    if link == LOCAL:
        _run_here(spec, link, folder)
        return "shared memory; torch's DDP on Gloo over loopback"
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(spec.ranks, link))
        except UsageError as error:
            _run_here(spec, link, folder)
            return f"ThrottledTransport, so torch's DDP is not compared. ({error})"
        words = [sys.executable, "-m", "murmura.benchmarks.compare_rank", str(folder.absolute()), link]
        variables = {"MURMURA_TRANSPORT": "gloo", "MURMURA_TIMEOUT": f"{WAIT_SECONDS:g}", "OMP_NUM_THREADS": "1"}
        seconds = STEP_SECONDS * spec.num_steps * (len(spec.algorithms) + 1)
        hosts.run(words, env=variables, capture=True, timeout=seconds)
    return "Gloo between hosts in network namespaces"


def _run_here(spec: ComparisonSpec, link: str, folder: Path) -> None:
    try:
        run_world(
            compare_as_rank, spec.ranks, spec, link, folder.absolute(), False, kind="processes", timeout=WAIT_SECONDS
        )
    except MurmuraError:
        raise
    except (RuntimeError, OSError) as error:  # a peer's own error
        raise MurmuraError(f"the comparison on {link} failed: {error}") from error


# What the runs amount to


def compared(spec: ComparisonSpec, runs: Sequence[Run], notes: dict[str, str]) -> Comparison:
    """Rows and verdicts of runs that were made just now on this machine."""
    target = spec.target if spec.target is not None else common_target(runs)
    num_parameters = runs[0].result["num_parameters"]
    rows = tuple(row_of(run, target, num_parameters) for run in runs)
    verdicts = {
        link: verdict([row for row in rows if row.link == link], spec, target, num_parameters) for link in spec.links
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Comparison(spec, date, Machine.here(), target, num_parameters, notes, rows, verdicts)


def common_target(runs: Sequence[Run]) -> float:
    """The loss that all reach who learn about as well as plain all-reduce; if that is not there, as the best."""
    finals = {(run.settings["algorithm"]): run.result["loss"] for run in runs}
    plain = finals.get(BASELINE, finals.get(TORCH_DDP, min(finals.values())))
    return float(max(run.result["loss"] for run in runs if run.result["loss"] <= SOUND * plain))


def row_of(run: Run, target: float, num_parameters: int) -> Row:
    name, ranks = run.settings["algorithm"], run.num_ranks
    turns = list(_turns(run))
    reached: int | None = None
    for step, loss in evaluations(run):
        if loss <= target:
            reached = step
            break
    measured = run.result.get("wire_bytes_per_step")
    means = [Breakdown.of(records, ranks) for records in run.records.values()]
    return Row(
        link=run.settings["bandwidth"] or LOCAL,
        contestant=name,
        steps_to_target=reached,
        seconds_to_target=None if reached is None else sum(turns[: reached // BLOCK_STEPS]) / 1000,
        step_ms=statistics.median(turns) / BLOCK_STEPS,
        compute_ms=None if name == TORCH_DDP else statistics.fmean(each.compute_ms for each in means),
        step_bytes=statistics.fmean(each.step_bytes for each in means) if measured is None else measured,
        formula_bytes=formula_bytes(name, num_parameters, ranks),
        final_loss=run.result["loss"],
        consensus_distance=run.result["consensus_distance"],
    )


def formula_bytes(contestant: str, num_parameters: int, ranks: int) -> float:
    """What a rank sends in most of its steps: those of QAdam after its warm-up."""
    name = BASELINE if contestant == TORCH_DDP else contestant
    return bytes_per_step(recipe_named(name).algorithm(), num_parameters, ranks)


def _turns(run: Run) -> Iterator[float]:
    """The milliseconds of each turn on the slowest rank."""
    for begin in range(0, run.settings["steps"], BLOCK_STEPS):
        yield max(
            sum(each.wall_ms for each in records[begin : begin + BLOCK_STEPS]) for records in run.records.values()
        )


def evaluations(run: Run) -> list[tuple[int, float]]:
    """Steps done, and the held-out loss then."""
    return [(each.step + 1, each.logged["held_out"]) for each in run.records[0] if "held_out" in each.logged]


def predicted_ms(row: Row, compute_ms: float) -> tuple[float, float]:
    """Between what a step's time must lie by the formula: so much computing, and the bytes on the link.

    Both are the same but for algorithms whose exchange travels while the next gradients are computed: how much of it
    that hides is left open.
    """
    link_ms = 0.0 if row.link == LOCAL else row.formula_bytes / parse_rate(row.link) * 1000
    together = compute_ms + link_ms
    return (max(compute_ms, link_ms) if row.contestant in HIDING else together), together


def contradictions(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs of one link whose step times come in another order than the formulas say, though these are far apart."""
    compute_ms = statistics.median(row.compute_ms for row in rows if row.compute_ms is not None)
    wrong = []
    for one, other in itertools.permutations(rows, 2):
        _, at_most = predicted_ms(one, compute_ms)
        at_least, _ = predicted_ms(other, compute_ms)
        if at_most * APART < at_least and one.step_ms > other.step_ms:
            wrong.append((one, other))
    return wrong


def verdict(rows: Sequence[Row], spec: ComparisonSpec, target: float, num_parameters: int) -> str:
    """One sentence: what to use on this link, and why."""
    own = [row for row in rows if row.contestant != TORCH_DDP]
    link = "within this machine" if own[0].link == LOCAL else f"at {own[0].link}"
    what = f"For {spec.task} ({num_parameters / 1e6:.2g} M parameters) with {spec.ranks} ranks {link}"
    arrived = [row for row in own if row.seconds_to_target is not None]
    if not arrived:
        return f"{what} nobody reached a loss of {target:.3f} in {spec.num_steps} steps: take more steps."
    best = min(arrived, key=lambda row: row.seconds_to_target or 0.0)
    plain = next((row for row in rows if row.contestant == BASELINE), None)
    said = f"{what} use {best.contestant}: it reached a loss of {target:.3f} in {best.seconds_to_target:.1f} s"
    if plain is None or plain is best:
        others = [row for row in arrived if row is not best]
        if not others:
            return f"{said}, and nobody else did in {spec.num_steps} steps."
        next_best = min(others, key=lambda row: row.seconds_to_target or 0.0)
        return (
            f"{said}, {next_best.contestant} in {next_best.seconds_to_target:.1f} s; it takes {best.step_ms:.0f} ms a "
            f"step and {best.steps_to_target} steps, the other {next_best.step_ms:.0f} ms and "
            f"{next_best.steps_to_target} steps."
        )
    sends = (
        f"a step sends {readable_bytes(best.formula_bytes)} instead of {readable_bytes(plain.formula_bytes)} and takes "
        f"{best.step_ms:.0f} instead of {plain.step_ms:.0f} ms"
    )
    if plain.seconds_to_target is None or best.seconds_to_target is None:
        return f"{said}, which {BASELINE} did not reach in {spec.num_steps} steps; {sends}."
    return f"{said}, {BASELINE} in {plain.seconds_to_target:.1f} s, because {sends}."
