"""Runs torch's own distributed tests, which are in its wheel, on a backend: each in a group of its own.

A program of its own, because the tests read the backend and the number of ranks from the environment when they are
imported: ``python torch_suite.py --backend murmura --ranks 2 --json results.json [test ...]``. All ranks run all tests
one after the other in one process each, which takes a tenth of the time of starting processes for each test.

``--stand-in`` puts murmura's group in the place of Gloo's, for the tests that pass for no other name. Tests are called
directly, so that those that torch only marks as skipped for some backend run all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

SUITE = "torch.testing._internal.distributed.distributed_test"
PASSED, SKIPPED = "passed", "skipped"
ENDED = "a rank ended"
TEST_SECONDS, BARRIER_SECONDS = 60.0, 30.0


def stand_in_for_gloo() -> None:
    """Put murmura's group in the place of Gloo's."""
    import torch.distributed.distributed_c10d as c10d

    from murmura.integrations.c10d.groups import open_channel
    from murmura.integrations.c10d.process_group import MurmuraProcessGroup

    class StandIn(MurmuraProcessGroup):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            channel = open_channel(store, rank, size, timeout.total_seconds(), [])
            super().__init__(channel, store, timeout)

    c10d.ProcessGroupGloo = StandIn  # type: ignore[misc]


def load() -> Any:
    """The test case of the suite, which reads the environment now."""
    from torch.testing._internal.common_distributed import DistTestCases

    import murmura  # noqa: F401 (which registers the backend)

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("murmura")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = __import__(SUITE, fromlist=["DistributedTest"])

    class TorchSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        pass

    return TorchSuite, suite


def names() -> list[str]:
    case, _ = load()
    return [name for name in dir(case) if name.startswith("test_")]


def run_test(case: Any, suite: Any, name: str, rank: int, folder: str) -> str:
    """What became of one test on this rank."""
    import torch
    import torch.distributed as dist

    test = case(name)
    test.rank = rank
    test.file_name = f"{folder}/{name}/store"
    # torch's tests meet by files there, before and after each test too: some leave a group on which nothing runs.
    os.environ["TEMP_DIR"] = f"{folder}/{name}"
    suite.Barrier.barrier_id = 0
    backend = os.environ["BACKEND"]
    outcome = PASSED
    torch.manual_seed(0)
    try:
        seconds = min(20, suite.CUSTOM_PG_TIMEOUT.get(name, 20))
        dist.init_process_group(
            backend,
            init_method=f"file://{test.file_name}",
            world_size=int(os.environ["WORLD_SIZE"]),
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        test._barrier(timeout=BARRIER_SECONDS)
        getattr(test, name)()
        test._barrier(timeout=BARRIER_SECONDS)
    except unittest.SkipTest as skip:
        outcome = f"{SKIPPED}: {skip}"
    except SystemExit as code:
        outcome = f"{SKIPPED}: exit {code.code}"
    except BaseException:
        outcome = traceback.format_exc()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return outcome


def run_rank(rank: int, folder: str, stand_in: bool, parent: Any) -> None:
    """Run the tests whose names come through `parent`, until none comes."""
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    case, suite = load()
    if stand_in:
        stand_in_for_gloo()
        # They ask for events that end in another thread, which Python cannot make; ours are tested elsewhere.
        suite.PROFILING_SUPPORTED_BACKENDS = suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
    while name := parent.recv():
        faulthandler.dump_traceback_later(TEST_SECONDS, exit=True)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            outcome = run_test(case, suite, name, rank, folder)
        faulthandler.cancel_dump_traceback_later()
        parent.send(outcome)


def run(tests: list[str], ranks: int, stand_in: bool, verbose: bool) -> dict[str, list[str]]:
    """The outcomes of every test, by rank. The next test begins when all ranks have ended the one before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "murmura", SUITE])
    outcomes: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        os.environ["INIT_METHOD"] = f"file://{folder}/again"  # for the one test that makes its group anew
        pipes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_rank, args=(rank, folder, stand_in, theirs), daemon=True)
            process.start()
            theirs.close()
            ended.callback(process.kill)
            pipes.append(ours)
        for name in tests:
            for sub in ("barrier", "test_dir", "init_dir"):
                Path(folder, name, sub).mkdir(parents=True)
            for pipe in pipes:
                pipe.send(name)
            try:
                outcomes[name] = [pipe.recv() for pipe in pipes]
            except EOFError:  # a rank was stuck, and has told where on standard error
                outcomes[name] = [ENDED] * ranks
                break
            if verbose:
                print(f"{name}: {', '.join(each.splitlines()[-1][:100] for each in outcomes[name])}", flush=True)
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send("")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="murmura")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    if len(options.tests) == 1 and options.tests[0].endswith(".json"):
        options.tests = json.loads(Path(options.tests[0]).read_text())
    os.environ.update(
        BACKEND="gloo" if options.stand_in else options.backend,
        WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="127.0.0.1",
        TEMP_DIR=tempfile.gettempdir(),
    )
    outcomes = run(options.tests or names(), options.ranks, options.stand_in, options.verbose)
    if options.json:
        Path(options.json).write_text(json.dumps(outcomes))
    print(sum(all(each == PASSED for each in told) for told in outcomes.values()), "passed", file=sys.stderr)


if __name__ == "__main__":
    main()
