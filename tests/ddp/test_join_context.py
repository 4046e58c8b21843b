"""`join()` without a loader, torch's context manager: a rank out of data takes part in later rounds with zeros."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from ddp.models import all_equal, backward, errors_on, fill, number, on_ranks, values, weight, weights_of
from murmura import (
    DDP,
    Algorithm,
    AlgorithmImpl,
    Bucket,
    ByteGradAlgorithm,
    ConfigError,
    GradientAllReduceAlgorithm,
    Phased,
    PowerSGDAlgorithm,
    Transport,
    UsageError,
    run_world,
)
from worlds import SECONDS, torch_group

DATA = [[1.0], [3.0, 5.0, 6.0], [8.0, 7.0]]


def gradients(transport: Transport, divide_by_initial: bool) -> list[float]:
    """The gradient after each number of this rank's."""
    ddp = DDP(weight(), transport)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide_by_initial):
        for value in DATA[transport.rank]:
            ddp.zero_grad()
            backward(ddp, value)
            seen.append(ddp.module.weight.grad.item())
    assert ddp.module.weight.grad.item() == seen[-1]  # rounds without this rank leave its gradient alone
    ddp.zero_grad()
    backward(ddp, transport.rank)
    assert ddp.module.weight.grad.item() == 1.0  # afterwards all is as before
    return seen


def test_means_divide_by_all_ranks() -> None:
    assert on_ranks(gradients, 3, True) == [[4.0], [4.0, 4.0, 2.0], [4.0, 4.0]]


def test_means_divide_by_the_ranks_that_have_data() -> None:
    assert on_ranks(gradients, 3, False) == [[4.0], [4.0, 6.0, 6.0], [4.0, 6.0]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.rare = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_rare: bool) -> Tensor:
        x = self.norm(self.inner(x))
        return self.rare(x) if use_rare else x


def train(transport: Transport, algorithm: object, num_steps: list[int]) -> tuple[Tensor, list[float], int]:
    """With accumulation, a parameter used now and then, buffers, several buckets, and a round by hand."""
    rank = transport.rank
    ddp = DDP(fill(Model()), transport, algorithm=algorithm, bucket_size_bytes=30)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    with ddp.join():
        for index in range(num_steps[rank]):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(values(4, 3, seed=10 * index + rank), index % 2 == 0).square().mean().backward()
            if index % 3 == 2:
                ddp.sync_gradients()
            else:
                ddp(values(4, 3, seed=10 * index + rank + 5), False).square().mean().backward()
            optimizer.step()
        if rank == 1:
            with ddp.no_sync():  # a round that this rank begins and does not finish
                ddp(values(4, 3, seed=rank), True).square().mean().backward()
    ddp.verify_in_sync()
    buffers = [each.double().sum().item() for each in ddp.module.buffers()]
    return weights_of(ddp.module), buffers, ddp._replica.round


@pytest.mark.parametrize(
    "algorithm",
    [None, ByteGradAlgorithm(), PowerSGDAlgorithm(min_compression_rate=1.0)],
    ids=["plain", "8 bits", "powersgd"],
)
@pytest.mark.parametrize("num_steps", [[3, 1, 5], [4, 0, 2]], ids=str)
def test_all_ranks_end_with_the_weights_of_the_last(algorithm: object, num_steps: list[int]) -> None:
    results = on_ranks(train, 3, algorithm, num_steps)
    assert all_equal(results)
    assert results[0][2] == max(num_steps)


def test_the_weights_are_those_of_a_plain_loop() -> None:
    def run(transport: Transport) -> Tensor:
        ddp = DDP(fill(nn.Linear(3, 2).double()), transport)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        with ddp.join():
            for index in range([2, 5][transport.rank]):
                optimizer.zero_grad()
                ddp(values(4, 3, seed=10 * index + transport.rank, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
        return weights_of(ddp.module)

    model = fill(nn.Linear(3, 2).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for index in range(5):
        optimizer.zero_grad()
        for rank in range(2 if index < 2 else 1, 0, -1):
            seed = 10 * index + (1 if rank == 1 else 0)
            (model(values(4, 3, seed=seed, dtype=torch.float64)).square().mean() / 2).backward()
        optimizer.step()
    for weights in on_ranks(run, 2):
        torch.testing.assert_close(weights, weights_of(model), rtol=0, atol=1e-12)


def train_either_way(transport: Transport, algorithm: str, by_loader: bool) -> Tensor:
    """Rank 0 has two batches and rank 1 five; then all have some more, so that what messages lost counts."""
    ddp = DDP(fill(nn.Linear(6, 5).double()), transport, algorithm=algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    def take_step(index: int) -> None:
        optimizer.zero_grad()
        ddp(values(4, 6, seed=10 * index + transport.rank, dtype=torch.float64)).square().mean().backward()
        optimizer.step()

    own = range(2 if transport.rank == 0 else 5)
    with contextlib.nullcontext() if by_loader else ddp.join(divide_by_initial_world_size=False):
        for index in ddp.join(own) if by_loader else own:
            take_step(index)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)  # the moments of a rank that left its loop are old
    for index in range(5, 9):
        take_step(index)
    ddp.verify_in_sync()
    weights = weights_of(ddp.module)
    ddp.close()
    return weights


@pytest.mark.parametrize(
    "algorithm", ["powersgd:min_compression_rate=1", "gradient_allreduce:compressor=topk(ratio=0.2)"]
)
def test_what_messages_lost_is_that_of_a_loop_over_a_loader(algorithm: str) -> None:
    for weights, wanted in zip(
        *(on_ranks(train_either_way, 2, algorithm, each) for each in (False, True)), strict=True
    ):
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)


class OwnMean(AlgorithmImpl):
    def on_bucket_ready(self, bucket: Bucket) -> None:
        self.process_group.all_reduce(bucket.flat, "mean")


class Own(Algorithm):
    impl = OwnMean


def test_an_algorithm_of_ones_own_that_averages_gradients_is_taken() -> None:
    results = on_ranks(train, 3, Own(), [3, 1, 5])
    assert all_equal(results)
    assert torch.allclose(results[0][0], on_ranks(train, 3, None, [3, 1, 5])[0][0], rtol=0, atol=1e-6)


def test_buffers_come_from_a_rank_that_has_data() -> None:
    def run(transport: Transport) -> list[float]:
        model = weight()
        model.register_buffer("seen", torch.zeros(1))
        ddp = DDP(model, transport)
        seen = []
        with ddp.join():
            for _ in range([1, 3, 3][transport.rank]):
                ddp.module.seen.fill_(transport.rank + 1.0)
                backward(ddp, 1)
                seen.append(ddp.module.seen.item())
        return seen

    assert on_ranks(run, 3) == [[3.0], [3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]


def test_all_ranks_raise_when_one_is_out_of_data_if_so_wished() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(weight(), transport)
        with ddp.join(throw_on_early_termination=True):
            for value in DATA[transport.rank]:
                backward(ddp, value)

    first, second, third = errors_on(run, 3)
    assert "Rank 0 exhausted all inputs" in str(first)
    assert "Detected at least one rank that exhausted inputs" in str(second) == str(third)
    assert all(isinstance(each, UsageError) for each in (first, second, third))


def test_a_block_that_is_not_enabled_does_nothing() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport, algorithm="local_sgd")
        with ddp.join(enable=False):
            backward(ddp, transport.rank)
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [0.0, 1.0]


def test_a_world_of_one_has_nobody_to_wait_for() -> None:
    ddp = DDP(weight())
    with ddp.join():
        backward(ddp, 3)
    assert ddp.module.weight.grad.item() == 3
    ddp.close()


@pytest.mark.parametrize(
    "algorithm",
    [
        *("shift_one", "local_sgd", "qadam", "async", GradientAllReduceAlgorithm(average=False)),
        Phased("powersgd", 3, then="bytegrad"),
    ],
    ids=str,
)
def test_algorithms_that_do_not_average_gradients_are_refused(algorithm: str | Algorithm) -> None:
    ddp = DDP(weight(), algorithm=algorithm)
    with pytest.raises(UsageError, match=r"for batch in ddp.join\(loader\)"), ddp.join():
        pass
    ddp.close()


def test_blocks_and_loops_do_not_nest() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(weight(), transport)
        with ddp.join():
            with pytest.raises(UsageError, match="already open"), ddp.join():
                pass
            with pytest.raises(UsageError, match="already running"):
                next(ddp.join([1]))
            with pytest.raises(UsageError, match=r"inside ddp\.join"):
                ddp.set_algorithm("bytegrad")
        loop = ddp.join([1])
        next(loop)
        with pytest.raises(UsageError, match="finish or break its loop"), ddp.join():
            pass
        loop.close()

    on_ranks(run, 2)


def join_by_torch(transport: Transport, store: str) -> tuple[list[Tensor], bool, list[str]]:
    """torch's generic Join, and after that our own block, on the same model; with an optimizer of torch's beside it."""
    with torch_group(transport, store):
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

        ddp = DDP(fill(nn.Linear(3, 2).double()), transport)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)

        def loop(num_steps: int) -> Tensor:
            for index in range(num_steps):
                ddp.zero_grad()
                ddp(values(4, 3, seed=10 * index + transport.rank, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
            return weights_of(ddp.module)

        uneven = [2, 5][transport.rank]
        with Join([ddp, optimizer]):
            loop(uneven)
        seen = [weights_of(ddp.module)]
        with Join([optimizer]), ddp.join():
            loop(2)
        with Join([ddp], enable=False):
            seen.append(loop(2))
        errors = []
        try:
            with Join([ddp], throw_on_early_termination=True):
                for _ in range(2 + transport.rank):
                    ddp(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        except RuntimeError as error:
            errors.append(str(error))
        return seen, isinstance(ddp, Joinable), errors


def test_torchs_generic_join_takes_the_model(tmp_path: Path) -> None:
    results = run_world(join_by_torch, 2, str(tmp_path / "store"), kind="processes", timeout=SECONDS)
    assert all_equal(seen for seen, _, _ in results)
    model = fill(nn.Linear(3, 2).double())
    for index in range(5):  # by hand: rank 0 has two batches, and the mean is over both ranks all the same
        model.zero_grad()
        for rank in range(2) if index < 2 else [1]:
            x = values(4, 3, seed=10 * index + rank, dtype=torch.float64)
            (model(x).square().mean() / 2).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    (seen, is_joinable, first), (_, _, second) = results
    torch.testing.assert_close(seen[0], weights_of(model), rtol=0, atol=1e-12)
    assert is_joinable
    assert "exhausted all inputs" in first[0]
    assert "Detected at least one rank that exhausted inputs" in second[0]


def test_torchs_generic_join_needs_torch_distributed() -> None:
    ddp = DDP(weight())
    with pytest.raises(UsageError, match=r"Use ddp\.join\(\)"):
        Join([ddp])
    ddp.close()


def test_a_loader_takes_no_options() -> None:
    ddp = DDP(weight())
    with pytest.raises(ConfigError, match="takes no options"):
        ddp.join([number(1)], enable=False)  # type: ignore[call-overload]
    ddp.close()
