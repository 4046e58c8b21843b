"""The contract of the aggregators, on every transport: the mean, the same bits everywhere, or an error everywhere.

Inputs are made on the ranks from their seed; a rank returns digests, which the test compares with the oracle's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts.cases import digest, random
from contracts.test_broadcast import special_bits
from murmura import (
    CollectiveMismatch,
    ConfigError,
    DistributedConfig,
    InProcessTransport,
    TracedTransport,
    Transport,
    UsageError,
)
from murmura.aggregation import (
    AllReduceAggregator,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
    average_losses,
)
from oracles import aggregate as oracle
from worlds import WORLDS, World

SIZES = (1, 2, 3, 4, 5)
ORACLES = {AllReduceAggregator: oracle.mean_by_all_reduce, ParameterServer: oracle.mean_in_rank_order}
THREADS = WORLDS[0]
GLOO = World("gloo", "processes", transport="gloo", exact=False)  # for the few tests that it is quick enough for

Kind = type[AllReduceAggregator] | type[ParameterServer]


@pytest.fixture(params=ORACLES, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def make(kind: Callable[..., Any], transport: Transport) -> Any:
    """An aggregator with the least of a config: no address is needed, for the transport is there."""
    return kind(DistributedConfig(world_size=transport.world_size, rank=transport.rank, coordinator_addr=""), transport)


# The examples


def average(transport: Transport, kind: Kind, by_rank: list[list[float]]) -> list[float]:
    (mean,) = make(kind, transport).aggregate([torch.tensor(by_rank[transport.rank])])
    return mean.tolist()


@pytest.mark.parametrize(
    ("by_rank", "mean"),
    [
        ([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]], [3.0, 4.0, 5.0]),
        ([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]], [2.0, 3.0, 4.0]),
        ([[1.0], [2.0], [3.0]], [2.0]),  # a ring that passes on what it has summed so far gets 3, 2.33 and 2.67
        ([[1.0]] * 4, [1.0]),  # and here 2
    ],
    ids=["two", "other two", "three", "four"],
)
def test_the_mean_of_small_numbers(world: World, kind: Kind, by_rank: list[list[float]], mean: list[float]) -> None:
    assert world.run(average, len(by_rank), kind, by_rank) == [mean] * len(by_rank)


def hand_out(transport: Transport) -> list[float]:
    params = [torch.tensor([10.0, 20.0, 30.0])] if transport.rank == 0 else []
    (received,) = make(ParameterServer, transport).broadcast_params(params)
    return received.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_workers_with_empty_lists_get_the_parameters(world: World, size: int) -> None:
    assert world.run(hand_out, size) == [[10.0, 20.0, 30.0]] * size


# The mean, to the bit

SHAPES: dict[str, list[tuple[torch.dtype, tuple[int, ...]]]] = {
    "none": [],
    "scalar": [(torch.float32, ())],
    "empty": [(torch.float32, (0, 3))],
    "several": [(torch.float32, (5, 7)), (torch.float32, (0,)), (torch.float32, ()), (torch.float32, (1001,))],
    "mixed": [
        (torch.float32, (3, 4)),
        (torch.float64, (5,)),
        (torch.float16, (2, 3)),
        (torch.float32, (7,)),
        (torch.bfloat16, (11,)),
        (torch.float64, ()),
        (torch.bfloat16, (3, 0)),
    ],
    "large": [(torch.float32, (300, 301)), (torch.bfloat16, (123_457,)), (torch.float32, (50_001,))],
}


def gradients_of(name: str, rank: int) -> list[Tensor]:
    return [
        random(math.prod(shape), dtype, 100 * rank + index).reshape(shape).clone()
        for index, (dtype, shape) in enumerate(SHAPES[name])
    ]


def digests(means: dict[str, list[Tensor]]) -> dict[str, str]:
    return {f"{name}[{index}]": digest(mean) for name, each in means.items() for index, mean in enumerate(each)}


def average_all(transport: Transport, kind: Kind, rounds: int) -> list[dict[str, str]]:
    """Digests of the means of every list of SHAPES, several times over: buffers are reused between the calls."""
    aggregator: GradientAggregator = make(kind, transport)
    results = []
    for _ in range(rounds):
        means = {}
        for name in SHAPES:
            gradients = gradients_of(name, transport.rank)
            means[name] = aggregator.aggregate(gradients)
            for gradient, before, mean in zip(gradients, gradients_of(name, transport.rank), means[name], strict=True):
                assert digest(gradient) == digest(before)  # inputs stay as they were
                assert mean.numel() == 0 or mean.data_ptr() != gradient.data_ptr()
        results.append(digests(means))  # taken only now: a later call touches no mean
    return results


def check_means(world: World, kind: Kind, size: int, rounds: int) -> None:
    by_rank = {name: [gradients_of(name, rank) for rank in range(size)] for name in SHAPES}
    wanted = digests({name: ORACLES[kind](each, ring=world.hops) for name, each in by_rank.items()})
    first, *others = world.run(average_all, size, kind, rounds)
    assert all(other == first for other in others)
    assert len(first) == rounds
    for result in first:
        assert result.keys() == wanted.keys()
        if world.exact or kind is ParameterServer:  # which sums in rank order on any transport
            assert not {name for name in wanted if result[name] != wanted[name]}


@pytest.mark.parametrize("size", [pytest.param(each, marks=[pytest.mark.slow] * (each == 4)) for each in SIZES])
def test_means_are_the_oracles_to_the_bit(world: World, kind: Kind, size: int) -> None:
    check_means(world, kind, size, rounds=2)


def test_means_on_gloo(kind: Kind) -> None:
    check_means(GLOO, kind, 3, rounds=1)


def average_forms(transport: Transport, kind: Kind) -> list[Tensor]:
    values = torch.arange(12.0).reshape(3, 4) + transport.rank
    parameter = nn.Parameter(values.clone())
    image = values.reshape(1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
    gradients = [values.t(), values[:, ::2], torch.tensor([float(transport.rank)]).expand(4), parameter, image]
    gradients += [torch.complex(values, -values).conj(), parameter * 2]
    means = make(kind, transport).aggregate(tuple(gradients))
    assert not any(mean.requires_grad for mean in means)
    assert means[4].is_contiguous(memory_format=torch.channels_last)
    assert parameter.grad is None
    return means


def test_tensors_of_every_form(world: World, kind: Kind) -> None:
    values = torch.arange(12.0).reshape(3, 4) + 1
    wanted = [values.t(), values[:, ::2], torch.ones(4), values, values.reshape(1, 2, 2, 3)]
    wanted += [torch.complex(values, values), values * 2]
    for means in world.run(average_forms, 3, kind):
        assert all(torch.equal(mean, each) for mean, each in zip(means, wanted, strict=True))


class CountingTransport(TracedTransport):
    """Counts what was allocated, too."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.allocated: list[tuple[int, torch.dtype]] = []

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        self.allocated.append((numel, dtype))
        return super().allocate(numel, dtype, device)


def count_operations(inner: Transport, kind: Kind) -> tuple[list[tuple[str, int]], list[Any]]:
    transport = CountingTransport(inner)
    aggregator = make(kind, transport)
    for _ in range(3):
        aggregator.aggregate(gradients_of("mixed", transport.rank))
    return [(each.name, each.sent_bytes) for each in transport.operations], transport.allocated


def test_one_flat_exchange_for_each_dtype_in_memory_that_is_kept(kind: Kind) -> None:
    numels = {torch.float32: 19, torch.float64: 6, torch.float16: 6, torch.bfloat16: 11}
    flats = [numel * dtype.itemsize for dtype, numel in numels.items()]
    for rank, (operations, allocated) in enumerate(THREADS.run(count_operations, 3, kind)):
        assert sorted(allocated, key=str) == sorted(((numel, dtype) for dtype, numel in numels.items()), key=str)
        once = [("all_reduce", 16)]  # the digest of the layout
        for num_bytes in flats:
            if kind is AllReduceAggregator:
                once += [("all_reduce", num_bytes)]
            else:
                up, down = (0, num_bytes) if rank == 0 else (num_bytes, 0)
                once += [("reduce", up), ("broadcast", down)]
        assert operations == 3 * once
    ((operations, allocated),) = THREADS.run(count_operations, 1, kind)
    assert (operations, allocated) == ([], [])


# A parameter server's parameters

PARAMS = [
    (torch.float32, (4, 3)), (torch.int64, ()), (torch.bool, (5,)), (torch.bfloat16, (0, 2)), (torch.float32, (7,)),
    (torch.uint8, (3, 1)), (torch.complex128, (2,)), (torch.float64, (100_003,)),
]  # fmt: skip


def params_of(rank: int) -> list[Tensor]:
    made = [random(math.prod(shape), dtype, rank + 50).reshape(shape).clone() for dtype, shape in PARAMS]
    return [*made, torch.arange(6.0).to(torch.float8_e4m3fn), special_bits(10)]


def hand_out_all(transport: Transport) -> list[list[str]]:
    """Digests of what arrives where workers pass nothing, and where they pass lists of their own."""
    server = make(ParameterServer, transport)
    results = []
    for workers_pass_lists in (False, True, False):
        params = params_of(transport.rank) if workers_pass_lists or transport.rank == 0 else []
        received = server.broadcast_params(params)
        if params:
            assert [digest(each) for each in params] == [digest(each) for each in params_of(transport.rank)]
            for each, param in zip(received, params, strict=True):
                assert each.numel() == 0 or each.data_ptr() != param.data_ptr()
        results.append([digest(each) for each in received])
    assert server.broadcast_params([]) == []
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_bit_of_rank_0s_parameters_arrives(world: World, size: int) -> None:
    wanted = [digest(param) for param in params_of(0)]
    assert world.run(hand_out_all, size) == [[wanted] * 3] * size


def test_gloo_hands_out_too() -> None:
    wanted = [digest(param) for param in params_of(0)]
    assert GLOO.run(hand_out_all, 3) == [[wanted] * 3] * 3


# Disagreement

ODD = 1  # the rank that passes something else
AGREED = [(torch.float32, (3,)), (torch.float64, (2, 2))]
DISAGREEMENTS: dict[str, tuple[list[tuple[torch.dtype, tuple[int, ...]]], str, str]] = {
    # what rank ODD passes, and what the table says of the others and of it
    "one more": ([*AGREED, (torch.float32, ())], "2 tensors; there is no [2]", "3 tensors; [2] is float32[]"),
    "one less": (AGREED[:1], "2 tensors; [1] is float64[2, 2]", "1 tensor; there is no [1]"),
    "none": ([], "2 tensors; [0] is float32[3]", "0 tensors; there is no [0]"),
    "another shape": (
        [AGREED[0], (torch.float64, (4,))], "2 tensors; [1] is float64[2, 2]", "2 tensors; [1] is float64[4]",
    ),
    "another dtype": (
        [(torch.bfloat16, (3,)), AGREED[1]], "2 tensors; [0] is float32[3]", "2 tensors; [0] is bfloat16[3]",
    ),
    "another order": (AGREED[::-1], "2 tensors; [0] is float32[3]", "2 tensors; [0] is float64[2, 2]"),
    "an empty one more": ([*AGREED, (torch.float32, (0,))], "there is no [2]", "[2] is float32[0]"),
}  # fmt: skip


def disagree(inner: Transport, kind: Kind, method: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """What this rank is told in each case, which has a channel of its own: the error, and all that was sent."""
    return {name: disagree_once(inner, kind, method, DISAGREEMENTS[name][0]) for name in names}


def disagree_once(inner: Transport, kind: Kind, method: str, odd: list[Any]) -> dict[str, Any]:
    transport = TracedTransport(inner.channel("traced"))
    aggregator = make(kind, transport)
    layout = odd if transport.rank == ODD else AGREED
    tensors = [torch.full(shape, 7.0, dtype=dtype) for dtype, shape in layout]
    with pytest.raises(CollectiveMismatch) as caught:
        getattr(aggregator, method)(tensors)
    assert all(tensor.eq(7.0).all() for tensor in tensors)
    with pytest.raises(CollectiveMismatch, match="failed earlier"):  # as after any disagreement
        aggregator.aggregate([torch.ones(1)])
    sent = [(each.name, each.sent_bytes) for each in transport.operations]
    inner.barrier()  # the other channels are as they were
    transport.close()
    return {"message": str(caught.value), "calls": caught.value.calls, "sent": sent}


def check_disagreements(by_rank: list[dict[str, dict[str, Any]]], call: str) -> None:
    for rank, results in enumerate(by_rank):
        for name, result in results.items():
            _, others_say, odd_says = DISAGREEMENTS[name]
            assert sorted(result["calls"]) == [*range(len(by_rank))]
            for each, said in result["calls"].items():
                assert said.startswith(f"{call} of "), name
                assert said.endswith(odd_says if each == ODD else others_say), name
                assert f"  rank {each}: {said}\n" in result["message"]
            assert result["message"].startswith(f"rank {rank}: the ranks disagree in {call}:")
            # A digest, and then words: no gradient was sent.
            assert [operation for operation, _ in result["sent"]] == ["all_reduce", "all_gather"]
            assert result["sent"][0][1] == 16


CALLS = {AllReduceAggregator: "AllReduceAggregator.aggregate", ParameterServer: "ParameterServer.reduce_gradients"}


@pytest.mark.parametrize("size", [2, 3])
def test_disagreement_is_told_on_every_rank(world: World, kind: Kind, size: int) -> None:
    check_disagreements(world.run(disagree, size, kind, "aggregate", [*DISAGREEMENTS]), CALLS[kind])


def test_disagreement_is_told_on_gloo_which_would_end_the_process(kind: Kind) -> None:
    names = ["one more", "another shape", "another dtype"]
    check_disagreements(GLOO.run(disagree, 2, kind, "aggregate", names), CALLS[kind])


def test_parameters_that_do_not_fit_rank_0s_are_told_on_every_rank(world: World) -> None:
    names = [name for name, (odd, _, _) in DISAGREEMENTS.items() if odd]  # an empty list fits
    results = world.run(disagree, 2, ParameterServer, "broadcast_params", names)
    check_disagreements(results, "ParameterServer.broadcast_params")


def disagree_beside_an_empty_list(transport: Transport) -> dict[int, str]:
    server = make(ParameterServer, transport)
    with pytest.raises(CollectiveMismatch) as caught:
        server.broadcast_params([torch.ones(transport.rank + 1)] if transport.rank < 2 else [])
    return caught.value.calls


def test_an_empty_list_does_not_hide_others_that_do_not_fit(world: World) -> None:
    for calls in world.run(disagree_beside_an_empty_list, 3):
        assert calls[0].endswith("[0] is float32[1]")
        assert calls[1].endswith("[0] is float32[2]")
        assert "empty list" in calls[2]


def call_different_things(transport: Transport) -> str:
    aggregator = make(AllReduceAggregator if transport.rank == 0 else ParameterServer, transport)
    with pytest.raises(CollectiveMismatch) as caught:
        aggregator.aggregate([torch.ones(2)])
    return str(caught.value)


def check_different_things(world: World) -> None:
    for message in world.run(call_different_things, 2):
        assert "rank 0: AllReduceAggregator.aggregate of 1 tensor\n" in message
        assert "rank 1: ParameterServer.reduce_gradients of 1 tensor\n" in message


def test_ranks_with_different_aggregators_are_told(world: World) -> None:
    check_different_things(world)


def test_ranks_with_different_aggregators_are_told_on_gloo() -> None:
    check_different_things(GLOO)


# Refusals


@pytest.mark.parametrize(
    ("world_size", "rank", "words"),
    [
        (2, 1, ["has 1 fault", "world_size=2", "world_size is 3"]),
        (3, 2, ["has 1 fault", "rank=2", "rank is 1"]),
        (1, 0, ["has 2 faults", "world_size=1", "world_size is 3", "rank=0", "rank is 1"]),
    ],
)
def test_a_config_that_contradicts_its_transport(kind: Kind, world_size: int, rank: int, words: list[str]) -> None:
    transport = InProcessTransport.create_group(3)[1]
    with transport, pytest.raises(ConfigError) as caught:
        kind(DistributedConfig(world_size=world_size, rank=rank), transport)
    assert all(word in str(caught.value) for word in words), caught.value


GOOD = torch.ones(2)
BAD_LISTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "None": ([GOOD, None], ("gradients[1]", "None", "zeros_like")),
    "number": ([2.5], ("gradients[0]", "float")),
    "integers": ([GOOD, GOOD, GOOD.long()], ("gradients[2]", "mean", "int64", "Cast")),
    "bool": ([GOOD.bool()], ("gradients[0]", "mean", "bool")),
    "float8": ([GOOD.to(torch.float8_e4m3fn)], ("gradients[0]", "float8", "Cast")),
    "sparse": ([GOOD, torch.eye(2).to_sparse()], ("gradients[1]", "sparse", ".to_dense()")),
    "meta": ([torch.ones(2, device="meta")], ("gradients[0]", "meta")),
    "one tensor": (torch.ones(2, 2), ("gradients", "single", "list")),
}


def try_refused(transport: Transport, kind: Kind) -> list[str]:
    """Each by one rank alone, a rank after another; then the mean with all."""
    aggregator = make(kind, transport)
    faults = []

    def expect(name: str, call: Callable[[], object], words: tuple[str, ...]) -> None:
        try:
            faults.append(f"{name}: returned {call()}")
        except UsageError as error:
            if not all(word in str(error) for word in words):
                faults.append(f"{name}: {error}")

    for number, (name, (bad, words)) in enumerate(BAD_LISTS.items()):
        if transport.rank == number % transport.world_size:
            expect(name, lambda bad=bad: aggregator.aggregate(bad), words)
            if kind is ParameterServer and name in ("None", "sparse", "one tensor"):
                words = tuple(word.replace("gradients", "params") for word in words)
                expect(f"{name} in params", lambda bad=bad: aggregator.broadcast_params(bad), words)
        (mean,) = aggregator.aggregate([torch.tensor([transport.rank + 1.0])])
        if mean.item() != (transport.world_size + 1) / 2:
            faults.append(f"{name}: the next mean is {mean}")
    return faults


@pytest.mark.parametrize("size", [1, 3])
def test_what_has_no_mean_is_refused_and_the_world_goes_on(world: World, kind: Kind, size: int) -> None:
    assert world.run(try_refused, size, kind) == [[]] * size


def test_a_local_aggregator_copies() -> None:
    gradients = [torch.arange(3.0), nn.Parameter(torch.ones(2, 2)), torch.zeros(0), torch.eye(2).to_sparse()]
    copies = LocalAggregator().aggregate(gradients)
    assert all(torch.equal(copy.to_dense(), each.to_dense()) for copy, each in zip(copies, gradients, strict=True))
    assert not any(copy.requires_grad for copy in copies)
    copies[0].add_(1)
    assert gradients[0].tolist() == [0.0, 1.0, 2.0]
    assert LocalAggregator().aggregate([]) == []
    with pytest.raises(UsageError, match=r"gradients\[1\] is None"):
        LocalAggregator().aggregate([GOOD, None])  # type: ignore[list-item]


# The loss


def loss_cases(size: int) -> list[tuple[list[float], list[int]]]:
    uneven = [5, 0, 6, 2, 0][:size]
    losses = [0.1 + 1.7 * rank for rank in range(size)]
    with_nan = [loss if count else math.nan for loss, count in zip(losses, uneven, strict=True)]
    return [(losses, [32] * size), (losses, uneven), (with_nan, uneven), (losses, [0] * (size - 1) + [1])]


def average_in_every_form(inner: Transport, cases: list[tuple[list[float], list[int]]]) -> list[list[float]]:
    transport = TracedTransport(inner)
    results = []
    for losses, counts in cases:
        value, count = losses[transport.rank], counts[transport.rank]
        exact = torch.tensor(value, dtype=torch.float64)
        forms: list[Any] = [value, exact, exact.reshape(1, 1), (exact.requires_grad_() * 1)]
        means = [average_losses(transport, loss, count) for loss in forms]
        assert all(type(mean) is float for mean in means)
        results.append(means)
    assert [each.name for each in transport.operations] == ["all_reduce"] * 4 * len(cases)
    return results


@pytest.mark.parametrize("size", SIZES)
def test_the_mean_loss_over_all_samples(world: World, size: int) -> None:
    cases = loss_cases(size)
    first, *others = world.run(average_in_every_form, size, cases)
    for (losses, counts), means in zip(cases, first, strict=True):
        assert means == pytest.approx([oracle.mean_loss(losses, counts)] * 4, rel=1e-14)
    assert all(other == first for other in others)


def average_oddities(transport: Transport) -> list[Any]:
    """What only some rank says, what all ranks find, and a half-precision loss; then a plain mean."""
    told: list[Any] = []
    if transport.rank == 1:
        bad: list[tuple[Any, Any]] = [(1.0, -1), (torch.ones(2), 3), (torch.ones(1) * 1j, 3), (1.0, 2.5)]
        for loss, count in bad:
            with pytest.raises(UsageError) as caught:
                average_losses(transport, loss, count)
            told.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        average_losses(transport, math.nan, 0)
    told.append(str(caught.value))
    nan = math.isnan(average_losses(transport, math.nan if transport.rank else 1.0, 1))
    big = average_losses(transport, torch.tensor(60_000.0, dtype=torch.float16), 2**24 + 1)
    return [*told, nan, big, average_losses(transport, torch.tensor(float(transport.rank)), 1)]


def test_losses_that_have_no_mean(world: World) -> None:
    others, odd = world.run(average_oddities, 2)
    assert "no rank has any samples" in others[0]
    assert others[1:] == [True, 60_000.0, 0.5]
    assert odd[4:] == others
    for message, words in zip(odd, ["num_samples=-1", "shape [2]", "complex64", "num_samples=2.5"], strict=False):
        assert words in message


# A training loop written by hand

STEPS, BATCH, LR = 20, 8, 0.05


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data.copy_(torch.randn(weight.shape, dtype=torch.float64, generator=generator) / 2)
    return model


def make_batches(size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(STEPS, size * BATCH, 3, dtype=torch.float64, generator=generator)
    return [(each, torch.stack([each.sum(1).sin(), each.prod(1)], 1)) for each in inputs]


def train(transport: Transport, kind: Callable[..., GradientAggregator]) -> tuple[list[Tensor], list[float]]:
    model = make_model()
    weights = list(model.parameters())
    if kind is ParameterServer:  # it can also hand out the first weights
        server = make(ParameterServer, transport)
        if transport.rank:
            nn.init.zeros_(weights[0])
        for weight, first in zip(weights, server.broadcast_params(weights), strict=True):
            weight.data.copy_(first)
    aggregator = LocalAggregator() if kind is LocalAggregator else make(kind, transport)
    losses = []
    own = slice(transport.rank * BATCH, (transport.rank + 1) * BATCH)
    for inputs, targets in make_batches(transport.world_size):
        loss = ((model(inputs[own]) - targets[own]) ** 2).mean()
        model.zero_grad()
        loss.backward()
        means = aggregator.aggregate([weight.grad for weight in weights])
        for weight, mean in zip(weights, means, strict=True):
            weight.data -= LR * mean
        losses.append(average_losses(transport, loss, BATCH))
    return [weight.detach().clone() for weight in weights], losses


@pytest.mark.parametrize(
    ("kind", "size"),
    [(AllReduceAggregator, 4), (ParameterServer, 4), (LocalAggregator, 1)],
    ids=["all-reduce", "server", "local"],
)
def test_training_on_shards_equals_training_on_all_the_data(kind: Callable[..., GradientAggregator], size: int) -> None:
    (weights, losses), *others = THREADS.run(train, size, kind)
    for other, other_losses in others:
        assert all(torch.equal(one, another) for one, another in zip(weights, other, strict=True))
        assert losses == other_losses
    alone = oracle.train_alone(make_model(), make_batches(size), LR)
    start = list(make_model().parameters())
    for weight, reference, first in zip(weights, alone, start, strict=True):
        assert torch.allclose(weight, reference, rtol=0, atol=1e-9)
        assert not torch.allclose(weight, first, rtol=0, atol=1e-3)  # it did train
    assert losses[-1] < losses[0]


# On a GPU


def average_on_devices(transport: Transport, kind: Kind) -> list[Tensor]:
    """Gradients on two devices, then parameters, a loss, and at last one gradient on another device than elsewhere."""
    aggregator = make(kind, transport)
    gradients = [torch.full((3,), float(transport.rank + 1), device=device) for device in ("cuda", "cpu", "cuda")]
    means = aggregator.aggregate(gradients)
    assert [mean.device.type for mean in means] == ["cuda", "cpu", "cuda"]
    server = make(ParameterServer, transport)
    means += server.broadcast_params(means if transport.rank == 0 else [])
    assert [mean.device.type for mean in means] == ["cuda", "cpu", "cuda"] * 2
    assert average_losses(transport, gradients[0][0], 1) == 1.5
    bad = gradients if transport.rank else [gradients[0], gradients[1].cuda(), gradients[2]]
    with pytest.raises(CollectiveMismatch, match=r"\[1\] is float32\[3\] on a device numbered 1"):
        aggregator.aggregate(bad)
    return [mean.cpu() for mean in means]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_on_two_devices(kind: Kind) -> None:
    for means in THREADS.run(average_on_devices, 2, kind):
        assert all(mean.eq(1.5).all() for mean in means)
