"""Runs torch's own tests of DistributedDataParallel, on the CPU, with a class in the place of torch's.

    python -m torch_ddp.suite --wrapper murmura --ranks 2 [name ...]

prints one line of JSON for each test. Every test runs in processes of its own, forked from this one.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import unittest
from typing import Any

SECONDS = 60  # for one test


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrapper", choices=("torch", "murmura"), required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "BACKEND": "gloo",
            "WORLD_SIZE": str(options.ranks),
            "TEMP_DIR": folder,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(SECONDS),
        }
        cases = load()
        use(options.wrapper)
        for name in options.tests or names_of(cases):
            print(json.dumps({"test": name, **run(cases, name)}), flush=True)


def load() -> type[unittest.TestCase]:
    """torch's tests, with ranks that are forked: to spawn them would import torch anew for every test."""
    from torch_ddp import redirect

    redirect.lift_skips()
    from torch.testing._internal.distributed import distributed_test

    redirect.redirect_devices()

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Cases


def use(wrapper: str) -> None:
    """Put the class that is under test in the place of torch's: `murmura.DDP` as it is, or torch's own.

    Torch's refuses device ids for a model on the CPU, where the redirection leaves it.
    """
    import torch
    from torch.testing._internal.distributed import distributed_test

    torchs = torch.nn.parallel.DistributedDataParallel
    if wrapper == "torch":
        original = torchs.__init__

        def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
            original(self, module, **kwargs)

        torchs.__init__ = init
        return
    import murmura

    torch.nn.parallel.DistributedDataParallel = distributed_test.DistributedDataParallel = murmura.DDP


def names_of(cases: type[unittest.TestCase]) -> list[str]:
    """The tests of DistributedDataParallel: it is in their name, their code, or a method that they call."""
    return [name for name in dir(cases) if name.startswith("test_") and _is_about_it(cases, name)]


def _is_about_it(cases: type[unittest.TestCase], name: str) -> bool:
    seen: set[str] = set()
    pending = [name]
    while pending:
        source = inspect.getsource(inspect.unwrap(getattr(cases, pending.pop())))
        if re.search(r"DistributedDataParallel|DDP", source):
            return True
        called = {each for each in re.findall(r"self\.(_\w+)\(", source) if hasattr(cases, each)} - seen
        seen |= called
        pending += called
    return False


def run(cases: type[unittest.TestCase], name: str) -> dict[str, str]:
    """How the test ended: passed, skipped or failed, and the last line of its error."""
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()):
        cases(name).run(result)
    if result.skipped:
        return {"outcome": "skipped", "reason": result.skipped[0][1]}
    problems = [*result.errors, *result.failures]
    if not problems:
        return {"outcome": "passed", "reason": ""}
    return {"outcome": "failed", "reason": problems[0][1]}


if __name__ == "__main__":
    sys.exit(main())
