"""What observing costs: training steps with and without an Observer, in turns, in one run.

Ranks train the character transformer of 4.8 million parameters on shared memory. Everything is recorded: JSON lines and
a trace. More and smaller buckets (--bucket-bytes) make more spans. Two figures are printed:

- the median ratio of a step that is observed to its neighbour that is not, with the half-width of its 95 % interval. A
  machine's speed changes from step to step by more than observing costs, so this takes a quiet machine and minutes;
- how long the same number of spans and a record take by themselves, beside the median step.

    python benchmarks/observing.py --seconds 60 --json observing.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import murmura
from murmura import observe
from murmura.tools.bench.models import CharLM

NUM_BATCHES = 8
WARM_UP_PAIRS = 5


def train(transport: murmura.Transport, seconds: float, bucket_bytes: int, folder: str) -> list[tuple[float, float]]:
    """Milliseconds of pairs of steps, the observed one first, on this rank."""
    torch.set_num_threads(1)
    model = CharLM()
    ddp = murmura.DDP(model.build(), transport, bucket_size_bytes=bucket_bytes)
    optimizer = model.optimizer(ddp)
    batches = model.batches(transport.rank, NUM_BATCHES)

    def step(number: int) -> float:
        characters, target = batches[number % NUM_BATCHES]
        transport.barrier()
        began = time.perf_counter()
        loss = model.loss(ddp(characters), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - began)

    pairs: list[tuple[float, float]] = []
    going, ends = torch.ones(1), time.monotonic() + seconds
    with observe.Observer(ddp, folder, trace=folder) as observer:
        while going.item():
            observed_first = len(pairs) % 2 == 0
            times = []
            for is_observed in (observed_first, not observed_first):
                ddp.observe(None)
                ddp.observe(observer if is_observed else None)
                times.append(step(len(pairs)))
            pairs.append((times[0], times[1]) if observed_first else (times[1], times[0]))
            going.fill_(time.monotonic() < ends)
            transport.all_reduce(going, "min")
    ddp.close()
    return pairs[WARM_UP_PAIRS:]


@dataclass
class StandIn:
    """What an Observer needs of a DDP, which does nothing."""

    rank: int = 0

    @property
    def transport(self) -> StandIn:
        return self

    def observe(self, observer: observe.Observer | None) -> None:
        """Nobody reports."""

    def consensus_distance(self) -> float:
        return 0.0


def cost_ms(num_spans: int, folder: str) -> float:
    """Milliseconds that a record and so many spans take by themselves, the median."""
    times = []
    with observe.Observer(StandIn(), folder, trace=folder) as observer:
        for number in range(300):
            began = time.perf_counter()
            observer.round_opens(number)
            for _ in range(num_spans):
                with observer.span_log.span("all_reduce", exchange=True, operation="all_reduce", sent_bytes=2**20):
                    pass
            observer.stepped()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--bucket-bytes", type=int, default=25 * 2**20, help="as DDP's bucket_size_bytes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = arguments.seconds, arguments.bucket_bytes, folder
        of_ranks = murmura.run_world(train, arguments.ranks, *options, kind="processes")
        lines = (Path(folder) / "rank-0.trace.json").read_text().splitlines()
        num_spans = round(sum('"ph": "X"' in line for line in lines) / sum("::step " in line for line in lines))
        cost = cost_ms(num_spans, folder)
    # A step counts with the slowest rank's time.
    pairs = [tuple(map(max, *pair)) if len(pair) > 1 else pair[0] for pair in zip(*of_ranks, strict=True)]
    observed, unobserved = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratios = [with_it / without for with_it, without in pairs]
    first, ratio, third = statistics.quantiles(ratios, n=4)
    # 1.57 IQR / sqrt(n) is McGill, Tukey and Larsen's 95 % interval of a median (The American Statistician, 1978).
    spread = 1.57 * (third - first) / len(ratios) ** 0.5
    print(f"{len(pairs)} pairs of steps of {arguments.ranks} ranks, {num_spans} spans a step")
    print(f"observed {observed:.2f} ms, not observed {unobserved:.2f} ms; ratio of a pair {ratio:.4f} +- {spread:.4f}")
    print(f"the observer by itself: {cost:.3f} ms a step, {100 * cost / unobserved:.2f} % of it")
    if arguments.json:
        row = {
            "ranks": arguments.ranks,
            "bucket_bytes": arguments.bucket_bytes,
            "pairs": len(pairs),
            "spans_a_step": num_spans,
        }
        times = {"observed_ms": observed, "unobserved_ms": unobserved, "cost_ms": cost}
        figures = {"ratio": ratio, "ratio_half_width": spread, "cost_ratio": cost / unobserved}
        Path(arguments.json).write_text(
            json.dumps({"benchmark": "observing", **row, **times, **figures}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
