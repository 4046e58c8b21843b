"""How well each method converges: the loss above the least possible one, after equal steps, in equal time and bytes.

About 500 trainings, each in one process with four ranks as threads; the method is described at the top of
`murmura.tools.experiments.convergence`. Finished runs are kept in the results file, and those that it holds are not
repeated: the study can be stopped at any time, and done in parts.

    python benchmarks/convergence.py                               # what is missing; then prints the tables
    python benchmarks/convergence.py --results mine.jsonl          # everything, on your machine
    python benchmarks/convergence.py --results mine.jsonl --minutes 8      # the next 8 minutes of it
    python benchmarks/convergence.py --report docs/convergence.md  # also writes tables and charts into the docs
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from murmura.errors import ConfigError
from murmura.tools.experiments import convergence_report as report
from murmura.tools.experiments.convergence import (
    BUDGETS,
    METHODS,
    PLAIN,
    Method,
    Results,
    Run,
    Study,
    append,
    read,
    train,
)

RESULTS = Path(__file__).parent.parent / "docs" / "figures" / "convergence.jsonl"


def run_missing(study: Study, results: Results, jobs: int, ends: float) -> Iterator[tuple[Run, list[float]]]:
    """Yield runs as they finish, and add them to `results`; after the time `ends` none is started."""
    # Not forked: a fork of a process with threads may hang.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("forkserver")) as pool:
        under_way: dict[Future[list[float]], Run] = {}
        try:
            while True:
                held = {*results, *under_way.values()}
                missing = [run for run in study.wanted(results) if run not in held]
                if time.monotonic() < ends:
                    under_way |= {pool.submit(train, run): run for run in missing[: jobs - len(under_way)]}
                if not under_way:
                    return
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    run = under_way.pop(future)
                    results[run] = future.result()
                    yield run, results[run]
        finally:
            pool.shutdown(cancel_futures=True)


def methods_named(names: str) -> tuple[Method, ...]:
    """The methods with these labels or algorithms, and plain all-reduce; any algorithm may be named."""
    known = {text: method for method in METHODS for text in (method.label, method.algorithm)}
    chosen = [known.get(name) or Method(name, name, "others") for name in names.split(",")]
    return tuple(dict.fromkeys([known[PLAIN], *chosen]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", metavar="FILE", type=Path, default=RESULTS, help="where finished runs are kept")
    parser.add_argument("--jobs", metavar="N", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--minutes", metavar="M", type=float, default=float("inf"), help="then start no more runs")
    parser.add_argument("--methods", metavar="LIST", type=methods_named, default=METHODS, help="only these algorithms")
    parser.add_argument("--seeds", metavar="N", type=int, default=len(Study().seeds), help="how many are reported")
    parser.add_argument("--steps", metavar="N", type=int, default=Study().steps, help="of a run without a limit")
    parser.add_argument("--report", metavar="PAGE", type=Path, help="write tables and charts there")
    arguments = parser.parse_args()
    study = Study(arguments.methods, tuple(range(1, arguments.seeds + 1)), arguments.steps)
    results = read(arguments.results)
    ends = time.monotonic() + 60 * arguments.minutes
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("starting", total=study.num_runs)
        progress.update(bar, completed=sum(run in results for run in study.wanted(results)))
        for run, curve in run_missing(study, results, arguments.jobs, ends):
            append(arguments.results, run, curve)
            progress.update(bar, advance=1, description=f"{run.algorithm}, rate {run.rate:g}: {curve[-1]:.3f}")
    num_done = sum(run in results for run in study.wanted(results))
    if not study.is_complete(results):
        print(f"{num_done} of {study.num_runs} runs are in {arguments.results}. Start this again for the rest.")
        return
    print(f"All {num_done} runs are in {arguments.results}.")
    for budget in BUDGETS:
        print(f"\nBudget: {budget}\n{report.table(study, results, budget)}")
    if arguments.report:
        report.write(arguments.report, study, results)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
