"""The convergence study: how far above the least possible loss each method ends, after equal steps, time or bytes.

Every run trains the same small model on `Trigrams`, whose floor is known. A method's learning rate is the best of
`RATES` on a seed of its own; for a budget of at most half the steps, the best of that one and the two next to it, with
that many steps. Then it runs on the seeds that are reported. Runs with the same seed see the same data in the same
order and begin with the same weights, so methods are compared seed by seed.

A method gets as many steps as its budget allows, at most those of the study, with a schedule of that length:

- "steps": all of them. "unlike": the same, but every rank has contexts of its own.
- "time": those that end when a run without communication would. Computing a step takes 1; the exchange of plain
  all-reduce takes `LINK`, that of others as much less as they send fewer bytes. It comes on top of computing, unless
  the algorithm hides it. Latency and the time for encoding are left out: `murmura bench network` measures them.
- "bytes": those in which a rank sends no more than it sends in a fifteenth of the steps under plain all-reduce.

Bytes are those of `Algorithm.bytes_per_round`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from murmura.algorithms.names import PLAIN, algorithm_named
from murmura.errors import ConfigError
from murmura.launch import run_world
from murmura.tools.experiments.loop import Training
from murmura.tools.experiments.tasks import Batch, Task
from murmura.transports.base import Transport

RANKS = 4
STEPS = 600
RATES: tuple[float, ...] = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
TUNING_SEED = 0
NUM_SEEDS = 5
SKEW = 2.0  # of the shards, where they are unlike
LINK = 4.0
SHARE_OF_BYTES = 1 / 15
EVALUATIONS = 20
BUDGETS = ("steps", "unlike", "time", "bytes")


@dataclass(frozen=True)
class Method:
    """An algorithm as the study names it; `family` says with which others a chart shows it."""

    label: str
    algorithm: str
    family: str


METHODS = (
    Method("all-reduce", PLAIN, "all"),
    Method("bf16", "gradient_allreduce:compressor=bf16", "fewer bits"),
    Method("bytegrad (uint8)", "bytegrad", "fewer bits"),
    Method("uint4", "gradient_allreduce:compressor=uint4", "fewer bits"),
    Method("sign", "gradient_allreduce:compressor=sign", "fewer bits"),
    Method("qadam (uint8)", "qadam", "fewer bits"),
    Method("qadam sign", "qadam:compressor=sign", "fewer bits"),
    Method("topk 1 %", "gradient_allreduce:compressor=topk", "fewer numbers"),
    Method("randomk 1 %", "gradient_allreduce:compressor=randomk", "fewer numbers"),
    Method("powersgd rank 1", "powersgd", "fewer numbers"),
    Method("powersgd rank 4", "powersgd:rank=4", "fewer numbers"),
    Method("decentralized", "decentralized", "fewer peers"),
    Method("shift_one", "shift_one", "fewer peers"),
    Method("push_sum", "push_sum", "fewer peers"),
    Method("low_precision_decentralized", "low_precision_decentralized", "fewer peers"),
    Method("async", "async", "fewer exchanges"),
    Method("local_sgd", "local_sgd", "fewer exchanges"),
    Method("diloco", "diloco", "fewer exchanges"),
    Method("sparse_loco", "sparse_loco", "fewer exchanges"),
    Method("streaming_diloco", "streaming_diloco", "fewer exchanges"),
)


# The task


class NeuralTrigram(nn.Module):
    """Two symbols, embedded, and an MLP that predicts the next."""

    def __init__(self, symbols: int, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(symbols, width) for _ in range(2))
        self.layers = nn.Sequential(
            *(nn.Linear(2 * width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU()),
            nn.Linear(hidden, symbols),
        )

    def forward(self, context: Tensor) -> Tensor:
        embedded = [each(context[:, place]) for place, each in enumerate(self.embeddings)]
        logits: Tensor = self.layers(torch.cat(embedded, dim=1))
        return logits


@dataclass(frozen=True)
class Trigrams(Task):
    """Text of a random order-2 Markov chain: predict a symbol from the two before it.

    Contexts are drawn from the chain's stationary distribution; with `skew`, each rank has some first symbols more
    often than others do. What follows a context is the same everywhere. The held-out "batch" is the whole distribution,
    so the loss on it is the expected one, without an error from sampling, and less the floor: the excess.
    """

    batch_size: int = 64
    learning_rate: float = 1e-2
    symbols: int = 32
    skew: float = 0.0

    @cached_property
    def transitions(self) -> Tensor:
        """P[a, b, c]: the probability that c follows a, b. It depends on each alone, and on both together."""
        generator, size = torch.Generator().manual_seed(self.seed), self.symbols
        shapes = [(size,), (size, size), (size, 1, size), (size, size, size)]
        logits = sum(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return torch.softmax(torch.as_tensor(logits), dim=-1)

    @cached_property
    def pairs(self) -> Tensor:
        """The probability of each pair of symbols: the stationary distribution of P."""
        likely = torch.full((self.symbols, self.symbols), 1 / self.symbols**2, dtype=torch.float64)
        for _ in range(200):
            likely = torch.einsum("ab,abc->bc", likely, self.transitions)
        return likely

    @cached_property
    def pairs_of_ranks(self) -> list[Tensor]:
        """The same on each rank."""
        generator = torch.Generator().manual_seed(self.seed + 1000)
        tilts = torch.randn((RANKS, self.symbols, 1), generator=generator, dtype=torch.float64).mul(self.skew).exp()
        return [self.pairs * tilt / (self.pairs * tilt).sum() for tilt in tilts]

    @property
    def floor(self) -> float:
        """The entropy of a symbol, given the two before it, in nats."""
        ((_, joint),) = self.held_out()
        return float(-(joint * (joint / joint.sum(1, keepdim=True)).log()).sum())

    def held_out(self) -> Sequence[Batch]:
        """All contexts, and the joint probability of each with each next symbol."""
        contexts = torch.cartesian_prod(*[torch.arange(self.symbols)] * 2)
        weights = torch.stack(self.pairs_of_ranks).mean(0).reshape(-1, 1)
        return [(contexts, weights * self.transitions.flatten(0, 1))]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The cross entropy with symbols; with joint probabilities, by how much it exceeds the floor."""
        if not targets.is_floating_point():
            return functional.cross_entropy(output, targets)
        true = (targets / targets.sum(1, keepdim=True)).log()
        return (targets * (true - functional.log_softmax(output.double(), dim=1))).sum()

    def _model(self) -> nn.Module:
        return NeuralTrigram(self.symbols)

    def _batch(self, rank: int, generator: torch.Generator) -> Batch:
        likely = self.pairs_of_ranks[rank].flatten()
        first = torch.multinomial(likely, self.batch_size, replacement=True, generator=generator)
        context = torch.stack([first // self.symbols, first % self.symbols], dim=1)
        following = torch.multinomial(self.transitions.flatten(0, 1)[first], 1, generator=generator)
        return context, following.squeeze(1)


# Runs


@dataclass(frozen=True)
class Run:
    """One training, which these fields determine."""

    algorithm: str
    rate: float
    seed: int
    steps: int
    skew: float = 0.0


Results = dict[Run, list[float]]
"""The excess loss of the mean model at `evaluated_at(run.steps)`; not a number where training has diverged."""


def evaluated_at(steps: int) -> list[int]:
    """The steps after which a run is evaluated, from 0 to the last."""
    return sorted({round(steps * index / EVALUATIONS) for index in range(EVALUATIONS + 1)})


def train(run: Run) -> list[float]:
    """Train in four threads of this process, and return the excess loss at `evaluated_at`, as results files hold it."""
    num_threads = torch.get_num_threads()
    try:
        return [float(f"{each:.5g}") for each in run_world(_learn, RANKS, run)[0]]
    finally:
        torch.set_num_threads(num_threads)


def _learn(transport: Transport, run: Run) -> list[float]:
    torch.set_num_threads(1)
    task = Trigrams(learning_rate=run.rate, seed=run.seed, skew=run.skew)
    with closing(Training(transport, task, run.algorithm, run.steps)) as training:
        curve = []
        for step in evaluated_at(run.steps):
            while training.step < step:
                training.advance()
            curve.append(training.evaluate())
        return curve


def read(path: Path) -> Results:
    """The runs in `path`, which need not exist."""
    results: Results = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            fields = json.loads(line)
            curve = fields.pop("excess")
            results[Run(**fields)] = curve
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"{path} holds a line that is no run ({error}). Remove it: {line[:60]!r}") from None
    return results


def append(path: Path, run: Run, curve: Sequence[float]) -> None:
    """Add a finished run to `path`."""
    line = json.dumps({**dataclasses.asdict(run), "excess": list(curve)})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


# The plan


@dataclass(frozen=True)
class Study:
    """Which runs there are. Plain all-reduce is among the methods, for the others are compared with it."""

    methods: Sequence[Method] = METHODS
    seeds: Sequence[int] = tuple(range(1, NUM_SEEDS + 1))
    steps: int = STEPS

    @property
    def plain(self) -> Method:
        return next(method for method in self.methods if method.algorithm == PLAIN)

    def tuning(self, method: Method, budget: str, results: Results) -> list[Run]:
        """The runs that decide on a learning rate: all rates, or, for at most half the steps, the best and the next.

        None, if it is not known yet which these are.
        """
        steps, rates = self.num_steps(method, budget), RATES
        if 2 * steps > self.steps:
            steps = self.steps
        else:
            best = self.rate(method, "steps", results)
            if best is None:
                return []
            place = RATES.index(best)
            rates = RATES[max(0, place - 1) : place + 2]
        return [Run(method.algorithm, rate, TUNING_SEED, steps) for rate in rates]

    def rate(self, method: Method, budget: str, results: Results) -> float | None:
        """The best learning rate of `method`; None while its tuning is not complete."""
        tuning = self.tuning(method, budget, results)
        if not tuning or not all(run in results for run in tuning):
            return None
        return min(tuning, key=lambda run: or_infinite(results[run][-1])).rate

    def num_steps(self, method: Method, budget: str) -> int:
        """How many steps `method` gets."""
        return fitting_steps(method.algorithm, budget, self.steps)

    def run(self, method: Method, budget: str, seed: int, rate: float) -> Run:
        skew = SKEW if budget == "unlike" else 0.0
        return Run(method.algorithm, rate, seed, self.num_steps(method, budget), skew)

    def measured(self, method: Method, budget: str, results: Results) -> list[Run]:
        """The runs of `method` that are reported, one for each seed; none while its learning rate is not known."""
        rate = self.rate(method, budget, results)
        return [] if rate is None else [self.run(method, budget, seed, rate) for seed in self.seeds]

    def wanted(self, results: Results) -> list[Run]:
        """All runs that are known so far, in the order in which they should begin."""
        pairs = list(itertools.product(self.methods, BUDGETS))
        tuning = [run for pair in pairs for run in self.tuning(*pair, results)]
        return list(dict.fromkeys(tuning + [run for pair in pairs for run in self.measured(*pair, results)]))

    def is_complete(self, results: Results) -> bool:
        """Whether nothing is left to run."""
        measured = (self.measured(*pair, results) for pair in itertools.product(self.methods, BUDGETS))
        return all(runs and all(run in results for run in runs) for runs in measured)

    @property
    def num_runs(self) -> int:
        """How many runs there are in all, at most: a rate at the edge of `RATES` has only one that is next to it."""
        total = 0
        for method in self.methods:
            lengths = {self.num_steps(method, budget) for budget in BUDGETS}  # "steps" and "unlike" have the same
            short = [steps for steps in lengths if 2 * steps <= self.steps]
            total += len(RATES) + 3 * len(short) + (len(lengths) + 1) * len(self.seeds)
        return total


def sent(algorithm: str, steps: int) -> list[float]:
    """The bytes that a rank has sent after each of `steps` steps; a warm-up sends what plain all-reduce does."""
    own = algorithm_named(algorithm).own_optimizer([nn.Parameter(torch.zeros(1))], 1e-3, steps)
    warm_up = 0 if own is None else own.defaults.get("warmup_steps", 0)
    each = [_bytes(PLAIN)] * min(warm_up, steps) + [_bytes(algorithm)] * max(0, steps - warm_up)
    return list(itertools.accumulate(each))


def time_taken(algorithm: str, steps: int) -> list[float]:
    """The time after each of `steps` steps, by the model at the top of this module."""
    hides = algorithm_named(algorithm).hides_exchange
    of_sending = [LINK * each / _bytes(PLAIN) for each in _differences(sent(algorithm, steps))]
    return list(itertools.accumulate(max(1.0, each) if hides else 1.0 + each for each in of_sending))


@cache
def fitting_steps(algorithm: str, budget: str, steps: int) -> int:
    """How many of `steps` steps the budget allows; at least one."""
    if budget in ("steps", "unlike"):
        return steps
    spent, limit = (time_taken, float(steps)) if budget == "time" else (sent, SHARE_OF_BYTES * sent(PLAIN, steps)[-1])
    # The length of a warm-up depends on that of the run: so it is searched, not divided.
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if spent(algorithm, middle)[-1] <= limit * (1 + 1e-9) else (low, middle - 1)
    return low


@cache
def _bytes(algorithm: str) -> float:
    shapes = [list(parameter.shape) for parameter in Trigrams().model().parameters()]
    return algorithm_named(algorithm).bytes_per_round(shapes, RANKS)


def _differences(sums: Iterable[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise([0.0, *sums])]


def or_infinite(loss: float) -> float:
    """What has diverged counts as infinite."""
    return loss if math.isfinite(loss) else math.inf
