"""What users do with models and gradients, under every algorithm: each case against the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from contracts.catalogue import Entry, every, minmax
from contracts.training import assert_close, by_step, perceptron, regression, spread, train_world
from ddp.models import Heads, fill, values
from murmura import DiLoCoAlgorithm, MinMaxUInt8
from oracles.algorithms.simulation import Task, simulate
from oracles.algorithms.weights import DiLoCo

SIZE = 3
STEPS = 6
IN_EIGHT_BITS = ("bytegrad", "qadam", "low_precision_decentralized")


def check(entry: Entry, task: Task, within: float = 1e-9, hosts: Sequence[int] | None = None) -> list[list[Tensor]]:
    """Train on threads and in the simulation; the flats by step and rank."""
    fitted = entry.fit(task)
    runs = train_world(SIZE, entry.make(), fitted, STEPS, hosts)
    flats = by_step(runs)
    assert_close(flats, simulate(entry.rule(runs), fitted, SIZE, STEPS, hosts), within)
    parameters = sum(parameter.numel() for parameter in fitted.make_model().parameters())
    for each in flats:
        assert not entry.lockstep or spread([flat[:parameters] for flat in each]) == 0
        assert all(bool(torch.isfinite(flat).all()) for flat in each)
    return flats


@every(in_pairs=True)
def test_an_ordinary_model(entry: Entry) -> None:
    check(entry, regression("momentum"))


@every(in_pairs=True)
def test_accumulated_gradients(entry: Entry) -> None:
    check(entry, regression("momentum", accumulate=3))


@every(in_pairs=True)
def test_clipped_gradients(entry: Entry) -> None:
    check(entry, regression("momentum", clip=0.05))


class Tied(nn.Module):
    """One matrix in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.Linear(5, 3, bias=False, dtype=torch.float64)
        self.back = nn.Linear(3, 5, dtype=torch.float64)
        self.again = nn.Linear(5, 3, dtype=torch.float64)
        self.again.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.back(torch.tanh(self.there(x)))))


def tied() -> nn.Module:
    return fill(Tied())


@every()
def test_tied_weights(entry: Entry) -> None:
    check(entry, replace(regression("momentum"), make_model=tied))


def normalised() -> nn.Module:
    layers = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    return fill(layers).double()


@every(in_pairs=True)
def test_batch_norm(entry: Entry) -> None:
    """Ranks see different data, so that their running statistics differ unless they are kept together."""
    flats = check(entry, replace(regression("momentum"), make_model=normalised))
    assert float((flats[-1][0] - flats[-2][0])[-12:].abs().max()) > 1e-6  # the statistics go on changing


def test_buffers_do_not_cost_a_compressed_outer_step_its_bits() -> None:
    """Statistics are whole numbers beside small changes of weights: they travel apart from them, uncompressed."""
    task = replace(regression("momentum"), make_model=normalised)
    runs = train_world(SIZE, DiLoCoAlgorithm(2, compressor=MinMaxUInt8()), task, STEPS)
    assert_close(by_step(runs), simulate(DiLoCo(2, q=minmax()), task, SIZE, STEPS))


def heads() -> nn.Module:
    return fill(Heads(num_heads=4, width=5)).double()


def some_heads(round_: int, micro: int, rank: int) -> tuple[Tensor, Tensor, list[int]]:
    """Head 0 is used by everybody, 1 by each rank in turn, 2 by rank 1 alone, and 3 by nobody."""
    seed = 10_000 * round_ + 100 * micro + rank
    use = [0] + [1] * (round_ % SIZE == rank) + [2] * (rank == 1)
    return values(4, 5, seed=seed, dtype=torch.float64), values(4, 5, seed=seed + 50, dtype=torch.float64) + rank, use


def loss_of_heads(model: nn.Module, shard: tuple[Tensor, Tensor, list[int]]) -> Tensor:
    inputs, targets, use = shard
    return ((model(inputs, use=use) - targets) ** 2).mean()


@every(in_pairs=True)
def test_unused_parameters(entry: Entry) -> None:
    task = replace(regression("momentum"), make_model=heads, shard=some_heads, loss=loss_of_heads)
    flats = check(entry, task)
    untouched = [each[-30:] for each in flats[-1]]
    initial = torch.cat([parameter.detach().reshape(-1) for parameter in heads().heads[3].parameters()])
    assert all(torch.allclose(each, initial, atol=1e-9, rtol=0) for each in untouched)


def half_frozen() -> nn.Module:
    model = perceptron()
    model[0].requires_grad_(False)
    return model


@every(in_pairs=True)
def test_frozen_parameters(entry: Entry) -> None:
    flats = check(entry, replace(regression("momentum"), make_model=half_frozen))
    frozen = torch.cat([parameter.detach().reshape(-1) for parameter in half_frozen()[0].parameters()])
    assert all(torch.equal(flat[: frozen.numel()], frozen) for flat in flats[-1])


class TwoKinds(nn.Module):
    """Parameters of two dtypes, which do not share a flat."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 6, dtype=torch.float64)
        self.narrow = nn.Linear(6, 3, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)).float()).double()


def two_kinds() -> nn.Module:
    return fill(TwoKinds())


@every(lambda entry: entry.name not in IN_EIGHT_BITS and not entry.is_rough)
def test_parameters_of_two_dtypes(entry: Entry) -> None:
    check(entry, replace(regression("momentum"), make_model=two_kinds), within=1e-5)


@every(lambda entry: entry.name in IN_EIGHT_BITS)
def test_parameters_of_two_dtypes_in_eight_bits(entry: Entry) -> None:
    """Other blocks than in the simulation, which knows one flat: near it, and ranks agree where they must."""
    task = entry.fit(replace(regression("sgd"), make_model=two_kinds))
    runs = train_world(SIZE, entry.make(), task, STEPS)
    assert_close(by_step(runs), simulate(entry.rule(runs), task, SIZE, STEPS), within=0.02)
    assert not entry.lockstep or all(spread(each) == 0 for each in by_step(runs))


@every(lambda entry: not entry.is_rough)
def test_bf16_stays_near_full_precision(entry: Entry) -> None:
    """Bits are few, so that runs are compared loosely; ranks that share their steps still agree to the bit."""
    fine = entry.fit(regression("sgd"))
    coarse = entry.fit(regression("sgd", torch.bfloat16))
    runs = train_world(SIZE, entry.make(), coarse, STEPS)
    flats = by_step(runs)
    wanted = simulate(entry.rule(runs), fine, SIZE, STEPS)
    assert_close([[flat.double() for flat in each] for each in flats], wanted, within=0.1)
    if entry.lockstep:
        assert all(torch.equal(flat, each[0]) for each in flats for flat in each)


@pytest.mark.parametrize("hosts", [[0, 0, 1]])
@every(lambda entry: entry.name != "low_precision_decentralized", in_pairs=True)
def test_hosts_with_accumulation_and_clipping(entry: Entry, hosts: Sequence[int]) -> None:
    check(entry, regression("momentum", accumulate=2, clip=0.05), hosts=hosts)
