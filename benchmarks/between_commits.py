"""Compares two checkouts: is the new one as fast as the old one, beside the same peer?

    python benchmarks/between_commits.py OLD/src NEW/src [PAIRS]

Each checkout in turn runs two rank processes that all-reduce in shared memory beside Gloo and train beside torch's DDP.
A gain is the peer's median time over murmura's, measured in the same processes. For each measure the script prints both
gains, and the median over pairs of new gain / old gain with a bootstrapped 90 % interval; above 1 the new checkout is
faster. It needs an otherwise idle machine.
"""

import contextlib
import copy
import importlib.util
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

SECONDS, MIN_ROUNDS = 1.0, 5  # for a measure, both contestants together
Times = dict[str, tuple[float, float]]  # by measure: median seconds of murmura and of the peer


def measure(transport: Any, folder: str) -> Times:
    torch.set_num_threads(1)
    gloo, group = gloo_groups(transport, folder)
    return {
        "all-reduce 4 KiB": all_reduce(transport, gloo, 4 * 2**10, num_buffers=64),
        "all-reduce 25 MiB": all_reduce(transport, gloo, 25 * 2**20, num_buffers=4),
        **{f"step {name}": training_step(transport, group, name) for name in ("charlm", "mlp")},
    }


def gloo_groups(transport: Any, folder: str) -> tuple[Any, Any]:
    """Gloo as a bare process group, and as a group that torch's DDP accepts."""
    c10d: Any = torch.distributed
    place = transport.rank, transport.world_size
    store = c10d.FileStore(f"{folder}/gloo", transport.world_size)
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=60)
    gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo", store), *place, options)
    group = c10d.ProcessGroup(store, *place)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return gloo, group


def all_reduce(transport: Any, gloo: Any, size_bytes: int, num_buffers: int) -> tuple[float, float]:
    options = torch.distributed.AllreduceOptions()
    own = [transport.allocate(size_bytes // 4) for _ in range(num_buffers)]
    ordinary = [torch.zeros(size_bytes // 4) for _ in range(num_buffers)]

    def batch(buffers: Sequence[torch.Tensor], call: Callable[[torch.Tensor], Any]) -> float:
        for buffer in buffers:
            buffer.fill_(transport.rank + 1)
        for _ in range(2):
            transport.barrier()  # the first wakes ranks that slept while others wrote
        began = time.perf_counter()
        for buffer in buffers:
            call(buffer)
        seconds = (time.perf_counter() - began) / len(buffers)
        assert all(buffer[-1] == 3 for buffer in buffers), "a wrong sum"
        return seconds

    peer = lambda buffer: gloo.allreduce([buffer], options).wait()  # noqa: E731
    return in_turns(transport, lambda: batch(own, transport.all_reduce), lambda: batch(ordinary, peer))


def training_step(transport: Any, group: Any, name: str) -> tuple[float, float]:
    import murmura

    is_old = importlib.util.find_spec("murmura.tools") is None  # from before the tools had a folder of their own
    recipes = importlib.import_module("murmura.benchmarks.models" if is_old else "murmura.tools.bench.models")
    recipe = recipes.MODELS[name]
    module = recipe.build()

    def steps(wrapped: Any) -> Iterator[float]:
        optimizer = recipe.optimizer(wrapped)
        for inputs, targets in itertools.cycle(recipe.batches(transport.rank, 8)):
            transport.barrier()
            began = time.perf_counter()
            recipe.loss(wrapped(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield time.perf_counter() - began

    ddp = murmura.DDP(copy.deepcopy(module), transport)
    peer = torch.nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
    with contextlib.closing(ddp):
        return in_turns(transport, steps(ddp).__next__, steps(peer).__next__)


def in_turns(transport: Any, *contestants: Callable[[], float]) -> tuple[float, float]:
    """Median seconds of both contestants on the slowest rank; they take turns, and who begins alternates."""
    for contestant in contestants * 3:
        contestant()  # touches pages; in the second step both DDPs plan their buckets again
    rounds: list[list[float]] = []
    began, go_on = time.perf_counter(), torch.ones(1)
    while go_on.item():
        taken = {place: contestants[place]() for place in ((0, 1) if len(rounds) % 2 else (1, 0))}
        rounds.append([taken[0], taken[1]])
        go_on[0] = time.perf_counter() - began < SECONDS or len(rounds) < MIN_ROUNDS
        transport.broadcast(go_on)
    times = torch.tensor(rounds, dtype=torch.float64)
    transport.all_reduce(times, "max")
    return statistics.median(times[:, 0].tolist()), statistics.median(times[:, 1].tolist())


def run_checkout(src: Path) -> Times:
    """Measure the checkout whose source folder is `src`, in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": str(src.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "measure", str(src.resolve())]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, timeout=300, check=True).stdout)


def compare(old: Path, new: Path, num_pairs: int) -> None:
    pairs: list[dict[Path, Times]] = []
    for number in range(num_pairs):
        pairs.append({src: run_checkout(src) for src in ((old, new) if number % 2 else (new, old))})
        print(f"pair {number + 1} of {num_pairs}", file=sys.stderr)
    print(f"{'gain over the peer':20} {'old':>8} {'new':>8} {'new/old':>8}  90 % interval")
    for name in pairs[0][old]:
        before, after = ([pair[src][name][1] / pair[src][name][0] for pair in pairs] for src in (old, new))
        ratios = [later / earlier for earlier, later in zip(before, after, strict=True)]
        medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(10_000))
        old_gain, new_gain, ratio = (statistics.median(each) for each in (before, after, ratios))
        print(f"{name:20} {old_gain:8.2f} {new_gain:8.2f} {ratio:8.3f}  {medians[500]:.3f} to {medians[-500]:.3f}")


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        import murmura

        assert murmura.__file__.startswith(sys.argv[2]), f"{murmura.__file__} would be measured, not {sys.argv[2]}"
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(murmura.run_world(measure, 2, folder, kind="processes", timeout=60.0)[0]))
    else:
        compare(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 15)
