"""Runs scripts on worlds of the library and holds every rank, after every action, to the simulation.

``python -m sequences.campaign --algorithms local_sgd --scripts 500 --world threads`` from the folder of the tests runs
more of them, and says how much of them was compared and after how many scripts each kind of failure was found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from murmura import run_world
from sequences.actions import Net, Script, Switch, columns
from sequences.drawing import draw_script
from sequences.position import ALGORITHMS
from sequences.rank import LONG_SECONDS, Told, run_scripts
from sequences.simulation import simulate

WITHIN = 1e-9
PATIENCE = 5.0  # seconds that a rank waits for another
WORLDS = {
    "threads": ("threads", None),
    "processes": ("processes", "shared_memory"),
    "gloo": ("processes", "gloo"),
}


@dataclass(frozen=True)
class Failure:
    """What a script has found: at which action, and which hazards had been met by then."""

    script: Script
    at: int
    what: str
    kind: str = "other numbers"  # or the errors that were raised

    @property
    def hazards(self) -> frozenset[str]:
        return self.script.hazards[min(self.at, len(self.script.hazards) - 1)]

    def __str__(self) -> str:
        hazards = ", ".join(sorted(self.hazards)) or "none"
        return f"{self.what}\nhazards met: {hazards}\n{self.script.told(self.at)}"


@dataclass
class Findings:
    """All failures of one algorithm on one kind of world."""

    algorithm: str
    world: str
    num_scripts: int = 0
    num_actions: int = 0
    num_compared: int = 0  # actions, up to where rounding errors decide what follows
    num_whole: int = 0  # scripts that were compared to their end
    failures: list[tuple[int, Failure]] = field(default_factory=list)  # with the number of the script, from 1

    def take(self, script: Script, told: Sequence[Told]) -> None:
        """Compare what the ranks have told of the next script."""
        wanted = simulate(script, told[0].layouts)
        self.num_scripts += 1
        self.num_actions += len(script.actions)
        self.num_compared += len(wanted[0])
        self.num_whole += len(wanted[0]) == len(script.actions)
        failure = compare(script, told, wanted)
        if failure is not None:
            self.failures.append((self.num_scripts, failure))

    def by_kind(self) -> dict[tuple[frozenset[str], str], list[tuple[int, Failure]]]:
        """The failures by the hazards they may come from and by what was seen; each with the first one first."""
        found: dict[tuple[frozenset[str], str], list[tuple[int, Failure]]] = {}
        for number, failure in self.failures:
            found.setdefault((failure.hazards, failure.kind), []).append((number, failure))
        return found

    def told(self, with_scripts: bool) -> str:
        """The kinds of failures, those with the fewest hazards first."""
        lines = []
        kinds = sorted(self.by_kind().items(), key=lambda each: (len(each[0][0]), each[1][0][0]))
        for (hazards, kind), found in kinds:
            number, failure = found[0]
            what = ", ".join(sorted(hazards)) or "no hazard"
            lines.append(f"{what} [{kind}]: {len(found)} times, first in script {number} (seed {failure.script.seed})")
            if with_scripts:
                lines.append("  " + str(failure).replace("\n", "\n  "))
        return "\n".join(lines)


def compare(script: Script, told: Sequence[Told], wanted: Sequence[Tensor]) -> Failure | None:
    """The first difference to the rows that are wanted of each rank, or the error that ended a rank before it."""
    names = columns(Net(script.buffers))
    parameters = {name for name, _ in Net(script.buffers).named_parameters()}
    is_parameter = torch.tensor([name in parameters for name in names])
    for at in range(len(wanted[0])):
        for rank, each in enumerate(told):
            if at < len(each.rows):
                found = _difference(each.rows[at], wanted[rank][at], names)
                if found:
                    return Failure(script, at, f"rank {rank}, action {at}: {found}")
        ends = [rank for rank, each in enumerate(told) if at >= len(each.rows)]
        if ends:
            errors = [f"rank {rank}: {told[rank].error}" for rank in ends]
            kinds = sorted({told[rank].error.partition(":")[0] for rank in ends})
            return Failure(script, at, f"action {at} raised\n" + "\n".join(errors), " and ".join(kinds))
        if not _may_round_apart(script, at) and _all_equal([rows[at][is_parameter] for rows in wanted]):
            replicas = [each.rows[at][is_parameter] for each in told]
            if not _all_equal(replicas):
                return Failure(script, at, f"action {at} leaves replicas that are not equal to the bit")
    return None


def _may_round_apart(script: Script, at: int) -> bool:
    """Whether the algorithm of action `at` adds mean - x to x, divides, or lets each rank sum in an order of its own.

    Replicas then agree but for the last place: they may happen to be equal in the simulation and not in the world.
    """
    choices = [script.choice, *(each.choice for each in script.actions[: at + 1] if isinstance(each, Switch))]
    phases = [each.name for each in (choices[-1], choices[-1].then) if each is not None]
    return not {*phases}.isdisjoint(("async", "push_sum", "exponential"))


def _difference(got: Tensor, wanted: Tensor, names: Sequence[str]) -> str:
    same = torch.isclose(got, wanted, rtol=WITHIN, atol=WITHIN, equal_nan=True)
    if bool(same.all()):
        return ""
    first = int((~same).nonzero()[0])
    count = int((~same).sum())
    return f"{count} numbers differ, the first is {names[first]}: {got[first].item()!r}, not {wanted[first].item()!r}"


def _all_equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(each, tensors[0]) for each in tensors)


def run_campaign(
    algorithm: str,
    seeds: Sequence[int],
    world: str = "threads",
    hazards: Collection[str] | None = None,
    max_failures: int = 1,
    patience: float = PATIENCE,
) -> Findings:
    """Run the scripts of `seeds` in one world, a new one after each script that raised; end at `max_failures`."""
    kind, transport = WORLDS[world]
    scripts = [draw_script(seed, algorithm, hazards) for seed in seeds]
    findings = Findings(algorithm, world)
    size = max((script.num_ranks for script in scripts), default=0)
    while findings.num_scripts < len(scripts) and len(findings.failures) < max_failures:
        rest = scripts[findings.num_scripts :]
        with tempfile.TemporaryDirectory() as folder:
            ends = run_world(
                run_scripts,
                size,
                rest,
                Path(folder),
                patience,
                kind=kind,
                transport=transport,
                timeout=LONG_SECONDS,
            )
        num_done = max(len(told) for told in ends)
        for number, script in enumerate(rest[:num_done]):
            told = [each[number] for each in ends[: script.num_ranks]]
            findings.take(script, [each for each in told if each is not None])
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--scripts", type=int, default=500, help="scripts of each algorithm")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", choices=WORLDS, default="threads")
    parser.add_argument("--hazards", default=None, help="the hazards that may be used, by a word of each; '' is none")
    parser.add_argument("--failures", type=int, default=1, help="go on until so many scripts have failed")
    parser.add_argument("--patience", type=float, default=PATIENCE)
    parser.add_argument("--quiet", action="store_true", help="tell the kinds of failures, not the scripts")
    options = parser.parse_args()
    hazards = None if options.hazards is None else [each for each in options.hazards.split(",") if each]
    failed = False
    for algorithm in options.algorithms.split(","):
        start = time.monotonic()
        seeds = range(options.first, options.first + options.scripts)
        findings = run_campaign(algorithm, seeds, options.world, hazards, options.failures, options.patience)
        seconds = time.monotonic() - start
        print(f"{algorithm} on {options.world}: {findings.num_scripts} scripts in {seconds:.1f} s, ", end="")
        print(f"{findings.num_whole} compared to their end, {findings.num_compared} of {findings.num_actions} ", end="")
        print(f"actions compared, {len(findings.failures)} failed", flush=True)
        if findings.failures:
            print("  " + findings.told(not options.quiet).replace("\n", "\n  "), flush=True)
        failed |= bool(findings.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
