"""Where the time of a DDP step goes: what wraps the bare step, measured call by call in two ranks on shared memory.

The bare module and murmura's DDP take turns. Of DDP's step the training thread's part is split into the copy of each
gradient into its bucket, the rest of the hooks, and waiting at the end of backward; of the communication thread, how
long it exchanges (with the part that is processor time) and how much of that the training thread waited for. The rest
of the difference to the bare step is computation that became slower: caches, memory bandwidth, the interpreter's lock.

    python benchmarks/step_profile.py --models mlp,charlm --threads 8 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import murmura
from murmura.ddp import gradient_reducer
from murmura.ddp.gradient_reducer import GradientReducer
from murmura.tools.bench.models import MODELS
from murmura.transports.shared_memory.control_block import ControlBlock

NUM_BATCHES = 8
WARM_UP = 5


class Timers:
    """Milliseconds by name, of the step under way; a call in another thread counts as well."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of ``owner.attribute``, on the clock and in processor time of its thread."""
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **options: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.spent[name] += 1e3 * (time.perf_counter() - began)
                self.spent[name + " (cpu)"] += 1e3 * (time.thread_time() - cpu_began)

        setattr(owner, attribute, timed)


def measure(transport: murmura.Transport, name: str, threads: int, seconds: float) -> dict[str, dict[str, float]]:
    """Medians over the steps of this rank, in milliseconds, of the bare module and of DDP."""
    torch.set_num_threads(threads)
    model, timers = MODELS[name], Timers()
    timers.wrap(GradientReducer, "add", "hooks")
    timers.wrap(GradientReducer, "_copy_in", "copy")
    timers.wrap(GradientReducer, "finish", "end of backward")
    timers.wrap(gradient_reducer, "wait_for", "waiting for exchanges")
    timers.wrap(ControlBlock, "wait", "waiting for the peer")
    bare = model.build()
    ddp = murmura.DDP(model.build(), transport)
    modules = {"bare": bare, "DDP": ddp}
    optimizers = {kind: model.optimizer(module) for kind, module in modules.items()}
    batches = model.batches(transport.rank, NUM_BATCHES)
    found: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in modules}

    def step(kind: str, number: int) -> None:
        inputs, target = batches[number % NUM_BATCHES]
        transport.barrier()
        timers.spent.clear()
        times = [time.perf_counter()]
        loss = model.loss(modules[kind](inputs), target)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizers[kind].step()
        optimizers[kind].zero_grad()
        times.append(time.perf_counter())
        phases = zip(("forward", "backward", "optimizer"), times[:-1], times[1:], strict=True)
        spent = {"step": times[-1] - times[0], **{phase: ended - began for phase, began, ended in phases}}
        for part, milliseconds in {**{part: 1e3 * each for part, each in spent.items()}, **timers.spent}.items():
            found[kind][part].append(milliseconds)

    going, number, ends = torch.ones(1), 0, time.monotonic() + seconds
    while going.item():
        for kind in modules:
            step(kind, number)
        number += 1
        if number == 1:  # the algorithm's exchange is known only now
            timers.wrap(ddp_reducer(ddp), "exchange", "exchange")
        going.fill_(time.monotonic() < ends or number < 3 * WARM_UP)
        transport.all_reduce(going, "min")
    ddp.close()
    return {
        kind: {part: statistics.median(each[WARM_UP:]) for part, each in parts.items()} for kind, parts in found.items()
    }


def ddp_reducer(ddp: murmura.DDP) -> GradientReducer:
    """The part of `ddp` that exchanges buckets."""
    return next(each for each in _reachable(ddp) if isinstance(each, GradientReducer))


def _reachable(ddp: murmura.DDP) -> list[Any]:
    near = list(vars(ddp).values())
    return near + [inner for each in near if hasattr(each, "__dict__") for inner in vars(each).values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mlp,charlm", help="a list of models of `murmura bench ddp`")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a rank")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each model")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    results = {}
    for name in options.models.split(","):
        arguments = (name, options.threads, options.seconds)
        of_ranks = murmura.run_world(measure, options.ranks, *arguments, kind="processes", timeout=120)
        results[name] = of_ranks[0]
        print(f"{name}, {options.ranks} ranks with {options.threads} threads, milliseconds on rank 0 (bare / DDP)")
        bare, ddp = of_ranks[0]["bare"], of_ranks[0]["DDP"]
        for part in ddp:
            print(f"  {part:24} {bare.get(part, 0.0):8.2f} {ddp[part]:8.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"ranks": options.ranks, "threads": options.threads, "models": results}, file, indent=2)


if __name__ == "__main__":
    main()
