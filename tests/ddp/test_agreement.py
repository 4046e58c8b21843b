"""Do the replicas agree: verification, distance, averages, seeds."""

from __future__ import annotations

import random
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn

from ddp.models import Heads, Scale, all_equal, backward, errors_on, fill, on_ranks, weight, weights_of
from murmura import DDP, CollectiveMismatch, ReplicaDivergence, Transport, UsageError, seed_everything

# verify_in_sync


def perturb(transport: Transport) -> None:
    ddp = DDP(fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), transport)
    ddp.verify_in_sync()
    with torch.no_grad():
        ddp.module[1].weight[1, 2] = 5.0
        ddp.module[1].bias.fill_(1.0)
        if transport.rank == 1:
            ddp.module[1].weight[1, 2] += 0.25
            ddp.module[1].weight[2, 2] += 0.25
            ddp.module[1].bias += 1
    ddp.verify_in_sync()


def test_a_perturbed_weight_is_named_on_every_rank() -> None:
    for error in errors_on(perturb, 3):
        assert isinstance(error, ReplicaDivergence)
        text = str(error)
        assert "'1.weight' is the first that differs, in 2 of 9 elements; element 5 is" in text
        assert "rank 0: 5.0\n  rank 1: 5.25\n  rank 2: 5.0" in text
        assert "broadcast_parameters(0)" in text


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.float32, 0.0, -0.0),
        (torch.float64, 1.0, 1.0 + 2**-52),
        (torch.bfloat16, 1.0, 1.0078125),
        (torch.float16, 2.0, float("nan")),
        (torch.complex64, 1 + 1j, 1 - 1j),
    ],
    ids=str,
)
def test_every_bit_of_every_dtype_counts(dtype: torch.dtype, one: complex, other: complex) -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(Scale(torch.full((2, 2), one, dtype=dtype)), transport)
        with torch.no_grad():
            ddp.module.scale[1, 0] = other if transport.rank == 1 else one
        ddp.verify_in_sync()

    for error in errors_on(run, 2):
        assert isinstance(error, ReplicaDivergence)
        assert f"'scale' is the first that differs, in 1 of 4 elements; element 2 is\n  rank 0: {one!r}" in str(error)


def test_equal_nans_and_strides_are_no_difference() -> None:
    def run(transport: Transport) -> None:
        conv = nn.Conv2d(2, 3, 3)
        if transport.rank == 1:
            conv.to(memory_format=torch.channels_last)
        ddp = DDP(conv, transport)
        with torch.no_grad():
            conv.bias.fill_(float("nan"))
        ddp.verify_in_sync()

    on_ranks(run, 2)


def test_verification_brings_ranks_together_again() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        with torch.no_grad():
            ddp.module.weight.fill_(transport.rank)
        with pytest.raises(ReplicaDivergence):
            ddp.verify_in_sync()
        ddp.broadcast_parameters(1)
        ddp.verify_in_sync()
        return ddp.module.weight.item()

    assert on_ranks(run, 3) == [1.0] * 3


def test_ignored_parameters_are_not_verified() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(nn.Sequential(weight(), weight()), transport, ignore=["1.weight"])
        with torch.no_grad():
            ddp.module[1].weight.fill_(transport.rank)
        ddp.verify_in_sync()

    on_ranks(run, 2)


def test_verify_every_looks_after_so_many_rounds() -> None:
    def run(transport: Transport) -> int:
        ddp = DDP(weight(), transport, verify_every=3)
        for step in range(10):
            if step == 4:
                with torch.no_grad():
                    ddp.module.weight += transport.rank
            try:
                backward(ddp, 1)
            except ReplicaDivergence:
                return step
        return -1

    assert on_ranks(run, 2) == [6, 6]  # at the forward of the first round whose number 3 divides


def test_verifying_while_another_rank_thaws_is_told_apart() -> None:
    """Both compare digests, but of different things."""

    def run(transport: Transport) -> None:
        transport.timeout = 5.0
        with closing(DDP(nn.Sequential(weight(), weight().requires_grad_(False)), transport)) as ddp:
            backward(ddp, 1)
            if transport.rank == 1:
                ddp.verify_in_sync()
            else:
                ddp.module.requires_grad_(True)
                backward(ddp, 1)

    for error in errors_on(run, 3):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 0: a comparison of what the model is\n  rank 1: a comparison of what its parameters hold" in str(
            error
        )


# Distance and average


def test_consensus_distance() -> None:
    def run(transport: Transport) -> list[float]:
        model = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(1, dtype=torch.complex64)})
        ddp = DDP(model, transport)
        seen = [ddp.consensus_distance()]
        with torch.no_grad():
            model["a"] += torch.tensor([3.0, 0.0]) * (-1) ** transport.rank
            model["b"] += 4j * (-1) ** transport.rank
        seen.append(ddp.consensus_distance())
        return seen

    assert on_ranks(run, 2) == [[0.0, 5.0]] * 2


def test_consensus_distance_is_the_root_mean_square() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        with torch.no_grad():
            ddp.module.weight.fill_(3.0 * transport.rank)  # 0, 3, 6: distances 3, 0, 3
        return ddp.consensus_distance()

    assert on_ranks(run, 3) == [pytest.approx(6**0.5)] * 3


def test_average_parameters_holds_the_mean_for_a_while() -> None:
    def run(transport: Transport) -> list[list[float]]:
        model = nn.Sequential(weight(), nn.BatchNorm1d(1))
        ddp = DDP(model, transport)
        with torch.no_grad():
            model[0].weight.fill_(transport.rank)
            model[1].running_mean.fill_(10 * transport.rank)
            model[1].num_batches_tracked.fill_(transport.rank)
        parameter = model[0].weight

        def state() -> list[float]:
            return [model[0].weight.item(), model[1].running_mean.item(), model[1].num_batches_tracked.item()]

        seen = [state()]
        with ddp.average_parameters():
            seen.append(state())
            assert model[0].weight is parameter
            assert model.state_dict()["0.weight"].item() == model[0].weight.item()
        seen.append(state())
        with pytest.raises(KeyError), ddp.average_parameters():
            raise KeyError
        seen.append(state())
        return seen

    for rank, seen in enumerate(on_ranks(run, 3)):
        own = [rank, 10 * rank, rank]
        assert seen == [own, [1, 10, rank], own, own]  # a count has no mean: it stays one's own


def test_average_parameters_of_equal_replicas_changes_no_bit() -> None:
    def run(transport: Transport) -> bool:
        ddp = DDP(fill(Heads()), transport)
        before = weights_of(ddp.module)
        with ddp.average_parameters():
            inside = weights_of(ddp.module)
        return torch.equal(before, weights_of(ddp.module)) and torch.allclose(before, inside)

    assert on_ranks(run, 2) == [True, True]


# Seeds


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


def test_seed_everything_repeats_and_differs_between_ranks_and_seeds() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        drawn = {}
        for seed in (0, 1, 2**40):
            for rank in (0, 1, 7):
                seed_everything(seed, rank)
                drawn[seed, rank] = draw()
                seed_everything(seed, rank)
                assert draw() == drawn[seed, rank]
        for kind in range(3):
            assert len({values[kind] for values in drawn.values()}) == 9
        # Not the sum of the two: rank 1 of seed 0 is not rank 0 of seed 1.
        assert not all_equal([drawn[0, 1], drawn[1, 0]])
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@pytest.mark.parametrize(("seed", "rank"), [(-1, 0), (0, -1)])
def test_negative_seeds_are_refused(seed: int, rank: int) -> None:
    with pytest.raises(UsageError, match="seed=-1" if seed < 0 else "rank=-1"):
        seed_everything(seed, rank)
