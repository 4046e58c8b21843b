"""PowerSGD: as the paper says, as torch's own hook does, and with nothing lost where steps or buckets change."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from contracts.grids import SIZES, grid
from contracts.test_algorithms_state import check_resumption
from contracts.test_scaled_feedback import HOW, overflow_once, weights_after
from contracts.training import assert_close, by_step, regression, spread, train_world
from ddp.models import errors_on, fill, on_ranks, values
from murmura import DDP, ConfigError, PowerSGDAlgorithm, TracedTransport, Transport, UsageError, run_world
from murmura.algorithms import powersgd
from oracles.algorithms.gradients import AllReduce
from oracles.algorithms.powersgd import PowerSGD
from oracles.algorithms.simulation import flat_of, simulate
from worlds import SECONDS

STEPS = 5


@grid("size, rank, bucket_size_bytes", SIZES, (1, 2), (10**6, 300), sample=4)
def test_it_is_as_simulated(size: int, rank: int, bucket_size_bytes: int) -> None:
    task = regression("momentum")
    algorithm = PowerSGDAlgorithm(rank, min_compression_rate=1.0)
    flats = by_step(train_world(size, algorithm, task, STEPS, bucket_size_bytes=bucket_size_bytes))
    assert_close(flats, simulate(PowerSGD(rank, 1.0), task, size, STEPS))
    assert all(spread(each) == 0 for each in flats)


@pytest.mark.parametrize(
    "choices",
    [{"warm_start": False}, {"error_feedback": False}, {"warmup_rounds": 3}, {"min_compression_rate": 3.0}],
    ids=str,
)
def test_every_choice_is_as_simulated(choices: dict[str, Any]) -> None:
    task, size = regression("adam"), 3
    flats = by_step(train_world(size, PowerSGDAlgorithm(1, **choices), task, STEPS))
    simulated = {"rate": choices.pop("min_compression_rate", 2.0), **choices}
    wanted = simulate(PowerSGD(1, **simulated), task, size, STEPS)
    assert_close(flats, wanted)
    assert_differ(wanted, simulate(PowerSGD(1), task, size, STEPS))  # the choice makes a difference


@pytest.mark.parametrize("error_feedback", [True, False])
def test_factors_in_many_messages_are_as_simulated(monkeypatch: pytest.MonkeyPatch, error_feedback: bool) -> None:
    monkeypatch.setattr(powersgd, "MESSAGE_BYTES", 1)
    task = regression("momentum")
    algorithm = PowerSGDAlgorithm(1, min_compression_rate=1.0, error_feedback=error_feedback)
    flats = by_step(train_world(3, algorithm, task, STEPS, bucket_size_bytes=300))
    assert_close(flats, simulate(PowerSGD(1, 1.0, error_feedback=error_feedback), task, 3, STEPS))
    assert all(spread(each) == 0 for each in flats)


def messages(transport: Transport) -> list[int]:
    """The number of float32 in each all-reduce of the second round, in order."""
    traced = TracedTransport(transport)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    ddp = DDP(model, traced, algorithm="powersgd", bucket_size_bytes=40 * 40 * 4 + 1)
    for _ in range(2):
        traced.operations.clear()
        ddp(torch.ones(1, 40)).sum().backward()
        ddp.zero_grad()
    found = [each.sent_bytes // 4 for each in traced.operations if each.name == "all_reduce"]
    ddp.close()
    return found


def test_a_message_holds_first_factors_and_the_second_ones_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q, bias, tail = 40, 40, 40, 2 * (8 + 2)
    together, _ = run_world(messages, 2, timeout=SECONDS)
    assert together == [4 * (p + bias), 4 * q, tail]
    monkeypatch.setattr(powersgd, "MESSAGE_BYTES", 2 * 4 * (p + bias))
    in_two, _ = run_world(messages, 2, timeout=SECONDS)
    assert in_two == [2 * (p + bias), 2 * (p + bias) + 2 * q, 2 * q, tail]


class Told(nn.Module):
    """Layers that tell `moments` when backward has passed them."""

    def __init__(self, num_layers: int, width: int, moments: list[str]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        self.first_done = threading.Event()
        for number, layer in enumerate(self.layers):
            layer.weight.register_post_accumulate_grad_hook(partial(self.tell, number, moments))

    def tell(self, number: int, moments: list[str], parameter: nn.Parameter) -> None:
        if number == 0 and len(moments) > 1:  # backward waits here, before the last bucket: a message must have gone
            assert self.first_done.wait(SECONDS)
        moments.append(f"gradient {number}")

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result


def overlapped(transport: Transport) -> bool:
    """Whether a message of factors has come back while the first layer's gradient was still to come."""
    moments: list[str] = []
    model = Told(6, 64, moments)
    ddp = DDP(model, transport, algorithm="powersgd", bucket_size_bytes=64 * 64 * 4)
    impl: Any = ddp.algorithm
    exchange = impl._exchange

    def watched() -> None:
        exchange()
        moments.append("message")
        model.first_done.set()

    impl._exchange = watched
    ddp(torch.ones(1, 64)).sum().backward()
    ddp.close()
    return moments.index("message") < moments.index("gradient 0")


def test_factors_travel_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(powersgd, "MESSAGE_BYTES", 2 * 64 * 4)  # the first factors of two layers
    assert run_world(overlapped, 2, timeout=SECONDS) == [True] * 2


def assert_differ(one: Any, other: Any) -> None:
    assert float((one[-1][0] - other[-1][0]).abs().max()) > 1e-6


def test_full_rank_is_the_mean_gradient() -> None:
    """P has as many columns as the matrix has rows: nothing is lost."""
    task = regression("sgd")
    flats = by_step(train_world(3, PowerSGDAlgorithm(3, min_compression_rate=1.0, warm_start=False), task, 1))
    whole = simulate(AllReduce(), task, 3, 1)
    names = [name for name, _ in task.make_model().named_parameters()]
    assert names[4] == "4.weight"  # 3 x 8: of rank 3 at most
    model = task.make_model()
    sizes = [each.numel() for each in model.parameters()]
    for got, wanted in zip(flats[0][0].split(sizes), whole[0][0].split(sizes), strict=True):
        if got.numel() in (3 * 8, 16, 8, 3):
            assert torch.allclose(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_accumulation_and_clipping(accumulate: int, optimizer: str) -> None:
    task = regression(optimizer, accumulate=accumulate, clip=0.5)
    assert_close(by_step(train_world(3, PowerSGDAlgorithm(), task, STEPS)), simulate(PowerSGD(1), task, 3, STEPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_replicas_stay_equal_in_every_dtype(dtype: torch.dtype) -> None:
    flats = by_step(train_world(3, PowerSGDAlgorithm(2, min_compression_rate=1.0), regression("sgd", dtype), STEPS))
    assert all(torch.equal(flat, each[0]) for each in flats for flat in each)
    assert flats[-1][0].isfinite().all()


class Odd(nn.Module):
    """Strange shapes, a frozen and an unused parameter, a complex one, and one in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.ones(()))
        self.phase = nn.Parameter(torch.full((6, 5), 1 + 0.5j))
        self.unused = nn.Parameter(torch.ones(6, 6))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x).sum() + (self.phase * self.phase).abs().sum()) * self.scale


def train_odd(transport: Transport) -> list[Tensor]:
    ddp = DDP(Odd(), transport, algorithm=PowerSGDAlgorithm(min_compression_rate=1.0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for number in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + transport.rank)
        ddp(torch.randn(2, 3, 5, 5, generator=generator)).backward()
        optimizer.step()
    ddp.verify_in_sync()
    assert ddp.module.unused.grad is None
    found = [parameter.detach().clone() for parameter in ddp.parameters()]
    ddp.close()
    return found


def test_odd_parameters_train_and_stay_equal() -> None:
    first, *others = run_world(train_odd, 3, timeout=SECONDS)
    assert all(each.isfinite().all() for each in first)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@pytest.mark.slow  # the catalogue has the usual choice
@pytest.mark.parametrize(
    "algorithm", [PowerSGDAlgorithm(warmup_rounds=3), PowerSGDAlgorithm(2, warm_start=False)], ids=str
)
def test_a_resumed_run_continues_bit_for_bit(algorithm: PowerSGDAlgorithm) -> None:
    check_resumption(3, algorithm, regression("momentum", torch.float32))


def resume(transport: Transport, then: PowerSGDAlgorithm, change: Callable[[dict[str, Any]], object]) -> int:
    """The rank of a gradient after a state of rank 2, changed, was loaded into `then`."""
    module = fill(nn.Linear(12, 10))
    state: dict[str, Any] = {}
    for algorithm in (PowerSGDAlgorithm(2), then):
        with closing(DDP(module, transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            if state:
                change(state["algorithm"])
                ddp.load_algorithm_state_dict(state)
            for step in range(2):
                optimizer.zero_grad()
                ddp(values(20, 12, seed=10 * step + transport.rank)).square().mean().backward()
                optimizer.step()
            state = ddp.algorithm_state_dict()
    assert module.weight.grad is not None
    return int(torch.linalg.matrix_rank(module.weight.grad, rtol=1e-4))


def cut_factor(state: dict[str, Any]) -> None:
    state["factors"]["tensors"]["weight"] = torch.zeros(3)


def cut_error(state: dict[str, Any]) -> None:
    state["errors"]["tensors"]["weight"] = torch.zeros(3)


def rename(state: dict[str, Any]) -> None:
    state["errors"]["tensors"]["head"] = state["errors"]["tensors"].pop("weight")


@pytest.mark.parametrize(
    ("then", "change", "words"),
    [
        (
            PowerSGDAlgorithm(3),
            id,
            r"a factor of shape \[12, 2\] for 'weight', and here it is \[12, 3\]: .* another rank",
        ),
        (PowerSGDAlgorithm(1), id, r"a factor of shape \[12, 2\] for 'weight', and here it is \[12, 1\]"),
        (PowerSGDAlgorithm(2, error_feedback=False), id, "lost of 'weight', which error_feedback=False would drop"),
        (PowerSGDAlgorithm(2), cut_factor, "3 elements of 'weight', .* saved for another model"),
        (PowerSGDAlgorithm(2), cut_error, "3 elements of 'weight', .* saved for another model"),
        (PowerSGDAlgorithm(2), rename, "120 elements of 'head', .* saved for another model"),
    ],
    ids=["larger", "smaller", "no feedback", "factor", "error", "name"],
)
def test_a_state_that_does_not_fit_is_refused(then: PowerSGDAlgorithm, change: Any, words: str) -> None:
    for error in errors_on(resume, 2, then, change):
        assert isinstance(error, ConfigError)
        assert re.search(words, str(error))


@pytest.mark.parametrize("then", [PowerSGDAlgorithm(2), PowerSGDAlgorithm(1, warm_start=False)], ids=str)
def test_a_state_whose_factors_are_not_needed_or_fit_is_taken(then: PowerSGDAlgorithm) -> None:
    assert on_ranks(resume, 2, then, id) == [then.rank] * 2


@grid("skipped, how", (0, 2), HOW, sample=2)  # buckets are cut anew after round 0
def test_skipped_steps_leave_nothing(how: str, skipped: int) -> None:
    """Two in a row: what the first brings back the second must bring back again."""
    run = partial(run_world, weights_after, 3, PowerSGDAlgorithm(), timeout=SECONDS)
    with_them = run(range(5), [skipped, skipped + 1], how)
    without = run([number for number in range(5) if number not in (skipped, skipped + 1)], [], how)
    for flat in (*with_them, *without):  # parameters share other messages before buckets are cut anew
        assert torch.allclose(flat, without[0], rtol=0, atol=1e-6)


def test_an_infinity_of_one_rank_is_seen_by_all_and_leaves_nothing() -> None:
    run = partial(run_world, overflow_once, 3, PowerSGDAlgorithm(), torch.float64)
    for overflows in (0, 2):
        rounds = [number for number in range(5) if number != overflows]
        with_it, without = (run(each, overflows, timeout=SECONDS) for each in (range(5), rounds))
        assert all(torch.allclose(flat, without[0], rtol=0, atol=1e-9) for flat in (*with_it, *without))


class Dead(nn.Module):
    """The first row and the first column of the weight get no gradient in the first rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))


def wake_up(transport: Transport) -> Tensor:
    ddp = DDP(Dead(), transport, algorithm=PowerSGDAlgorithm())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    target = torch.zeros(8, 8)
    target[1:, 1:] = torch.outer(torch.arange(1.0, 8), torch.arange(1.0, 8))
    for number in range(4):
        optimizer.zero_grad()
        (ddp.module.weight * (target if number > 1 else 0 * target)).sum().backward()
        optimizer.step()
    found = ddp.module.weight.detach().clone()
    ddp.close()
    return found


def test_a_gradient_of_zeros_does_not_end_the_iteration() -> None:
    (found, _) = run_world(wake_up, 2, timeout=SECONDS)
    assert found[1:, 1:].abs().min() > 0.5  # of rank one, so it is sent exactly


# torch's own hook


def build() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))).double()


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(8, 12, generator=generator).double(), torch.randn(8, 4, generator=generator).double() + rank


ROUNDS, START, RANK = 50, 2, 2


def initial_factors(names: list[str], shapes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """The Q that torch's hook draws in its first compressed round, for matrices in the order of its bucket."""
    state = torch.random.get_rng_state()
    torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
    found = {}
    for name in names:
        found[name] = torch.randn(1, shapes[name][1], RANK, dtype=torch.float64)[0]
    torch.random.set_rng_state(state)
    return found


def beside_torch(transport: Transport, store: str) -> float:
    """In a process of its own: how far the weights are from those under torch's hook after `ROUNDS` steps."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=transport.rank, world_size=transport.world_size)
    module = build()
    parameters = list(module.parameters())
    theirs = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=25)
    state = PowerSGDState(None, RANK, START, min_compression_rate=1.5, random_seed=0)
    order: list[list[int]] = []

    def hook(state, bucket):  # torch checks annotations, and these would be strings
        order.append([next(i for i, own in enumerate(parameters) if own is each) for each in bucket.parameters()])
        return powerSGD_hook(state, bucket)

    theirs.register_comm_hook(state, hook)
    algorithm = PowerSGDAlgorithm(RANK, min_compression_rate=1.5, warmup_rounds=START)
    ours = DDP(build(), transport, algorithm=algorithm)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (theirs, ours)]
    names = [name for name, _ in ours.module.named_parameters()]
    for number in range(ROUNDS):
        inputs, targets = batch(number, transport.rank)
        optimizers[0].zero_grad()
        nn.functional.mse_loss(theirs(inputs), targets).backward()
        optimizers[0].step()
        if number == START:  # torch has drawn its factors now: give ours the same
            in_bucket = [names[index] for index in order[-1]]
            shapes = {name: tuple(p.shape) for name, p in ours.module.named_parameters()}
            matrices = [name for name in in_bucket if len(shapes[name]) == 2 and is_compressed(*shapes[name])]
            saved = ours.algorithm_state_dict()
            by_shape = sorted(matrices, key=lambda name: [shapes[each] for each in matrices].index(shapes[name]))
            saved["algorithm"]["factors"]["tensors"] = initial_factors(by_shape, shapes)
            ours.load_algorithm_state_dict(saved)
        optimizers[1].zero_grad()
        nn.functional.mse_loss(ours(inputs), targets).backward()
        optimizers[1].step()
    distance = float((flat_of(module) - flat_of(ours.module)).abs().max())
    moved = float((flat_of(ours.module) - flat_of(build())).abs().max())
    ours.close()
    del theirs  # before its group, or torch waits for ever
    dist.destroy_process_group()
    assert moved > 0.1
    return distance


def is_compressed(height: int, width: int) -> bool:
    return 1.5 * RANK * (height + width) < height * width


def test_it_is_torchs_own_hook(tmp_path: Any) -> None:
    distances = run_world(beside_torch, 2, str(tmp_path / "store"), kind="processes", transport="gloo", timeout=SECONDS)
    assert max(distances) < 1e-6


# Formulas


def test_the_formula_counts_factors() -> None:
    shapes = [[100, 50], [100], [4, 4], [], [8, 3, 3, 3]]
    assert PowerSGDAlgorithm().bytes_per_round(shapes, 4) == 1.5 * 4 * (150 + 100 + 16 + 1 + 35)
    assert PowerSGDAlgorithm(2).bytes_per_round([[100, 50]], 2) == 4 * 300
    with pytest.raises(UsageError, match="shapes"):
        PowerSGDAlgorithm().bytes_per_round(1000, 4)
