"""Uneven data: `join` replays batches without weight, so that every rank runs the same number of rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from ddp.models import Scale, all_equal, backward, errors_on, fill, number, on_ranks, values, weight, weights_of
from murmura import DDP, Transport, UsageError
from murmura.algorithms import GradientAllReduceAlgorithm
from oracles import ddp as oracle

UNEVEN = pytest.mark.parametrize("lengths", [(1, 5), (5, 1), (3, 3), (1, 2, 7), (4, 1, 1, 6), (2,)], ids=str)


def gradients(transport: Transport, by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The gradient after each batch of a loop over this rank's numbers."""
    ddp = DDP(weight(), transport)
    seen = []
    for value in ddp.join(by_rank[transport.rank]):
        ddp.zero_grad()
        backward(ddp, value)
        seen.append(ddp.module.weight.grad.item())
    return seen


def test_ranks_that_have_run_out_do_not_count() -> None:
    data = [[1.0], [3.0, 5.0, 7.0], [8.0, 9.0], [4.0, 4.0, 1.0]]
    assert on_ranks(gradients, 4, data) == [[4.0, 6.0, 4.0]] * 4


def mlp() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())


def batches(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    seeds = [100 * rank + 2 * index for index in range(count)]
    return [
        (values(4, 3, seed=seed, dtype=torch.float64), values(4, 2, seed=seed + 1, dtype=torch.float64))
        for seed in seeds
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@UNEVEN
def test_training_equals_a_plain_loop_over_the_batches_that_exist(lengths: tuple[int, ...]) -> None:
    def run(transport: Transport) -> list[Tensor]:
        ddp = DDP(mlp(), transport, bucket_size_bytes=100)
        optimizer = adam(ddp)
        seen = []
        for batch in ddp.join(batches(transport.rank, lengths[transport.rank])):
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
            seen.append(weights_of(ddp.module))
        ddp.verify_in_sync()
        return seen

    results = on_ranks(run, len(lengths))
    assert all_equal(results)
    model = mlp()
    by_rank = [batches(rank, count) for rank, count in enumerate(lengths)]
    wanted = oracle.train_on_uneven_data(model, adam(model), by_rank, loss_of)
    assert len(results[0]) == len(wanted) == max(lengths)
    torch.testing.assert_close(results[0], wanted, rtol=0, atol=1e-9)


@UNEVEN
@pytest.mark.parametrize("by_hand", [False, True], ids=["last backward", "by hand"])
def test_accumulation_weighs_by_micro_batches(lengths: tuple[int, ...], by_hand: bool) -> None:
    """Means of two micro-batches a rank, of which a rank may have two, one or none; the rest comes after the loop."""

    def run(transport: Transport) -> list[Tensor]:
        ddp = DDP(mlp(), transport)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        optimizer.zero_grad()
        seen = []

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()
            seen.append(weights_of(ddp.module))

        count = 0
        for count, batch in enumerate(ddp.join(batches(transport.rank, lengths[transport.rank])), start=1):
            if count % 2 or by_hand:
                with ddp.no_sync():
                    (loss_of(ddp, batch) / 2).backward()
            else:
                (loss_of(ddp, batch) / 2).backward()
            if count % 2 == 0:
                ddp.sync_gradients()
                step()
        if count % 2:
            ddp.sync_gradients()
            for parameter in ddp.parameters():
                parameter.grad.mul_(2)  # half a step: its batches were divided by 2 as well
            step()
        return seen

    results = on_ranks(run, len(lengths))
    assert all_equal(results)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    by_rank = [batches(rank, count) for rank, count in enumerate(lengths)]
    wanted = oracle.train_on_uneven_data(model, optimizer, by_rank, loss_of, accumulate=2)
    torch.testing.assert_close(results[0], wanted, rtol=0, atol=1e-9)


def test_gradients_of_earlier_rounds_are_not_weighed_again() -> None:
    """They accumulate without no_sync(), as means over the data; in the second round one rank of two has data."""

    def run(transport: Transport) -> list[float]:
        with closing(DDP(weight(), transport)) as ddp:
            seen = []
            for value in ddp.join([1.0, 2.0] if transport.rank == 0 else [3.0]):
                backward(ddp, value)
                seen.append(ddp.module.weight.grad.item())
            return seen

    assert on_ranks(run, 2) == [[2.0, 4.0]] * 2


def test_pytorch_44425_join_and_no_sync_together() -> None:
    """Every rank leaves out the same rounds, whether it has data or not."""

    def run(transport: Transport) -> tuple[list[float], int]:
        ddp = DDP(weight(), transport)
        seen = []
        for index, value in enumerate(ddp.join([1.0] * (1 if transport.rank == 0 else 5))):
            if index == 3:
                with ddp.no_sync():
                    backward(ddp, value)
            else:
                backward(ddp, value)
                seen.append(ddp.module.weight.grad.item())
                ddp.zero_grad()
        return seen, ddp.algorithm_state_dict()["round"]

    # In the last round rank 1 has two micro-batches of 1, rank 0 none: the mean, as if all had brought two, is 2.
    assert on_ranks(run, 2) == [([1.0, 1.0, 1.0, 2.0], 4)] * 2


def test_several_rounds_of_one_batch_are_weighted_alike() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for value in ddp.join([10.0] if transport.rank == 0 else [2.0, 4.0]):
            for _ in range(2):
                ddp.zero_grad()
                backward(ddp, value)
                seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[6.0, 6.0, 4.0, 4.0]] * 2


def test_a_model_in_eval_mode_joins_too() -> None:
    """As in fine-tuning with frozen statistics."""

    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport).eval()
        seen = []
        for value in ddp.join([10.0] if transport.rank == 0 else [2.0, 4.0]):
            ddp.zero_grad()
            backward(ddp, value)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[6.0, 4.0]] * 2


def test_unused_parameters_inside_join() -> None:
    """A parameter that only the replaying rank would have used is used by nobody's data, and gets zero."""

    def run(transport: Transport) -> list[tuple[float, float | None]]:
        model = nn.ModuleDict({"common": weight(), "only_0": weight()})
        ddp = DDP(Forked(model), transport)
        seen = []
        for value in ddp.join([1.0] if transport.rank == 0 else [2.0, 3.0]):
            ddp.zero_grad()
            ddp(number(value), transport.rank == 0).sum().backward()
            seen.append((model["common"].weight.grad.item(), model["only_0"].weight.grad.item()))
        return seen

    assert on_ranks(run, 2) == [[(1.5, 0.5), (3.0, 0.0)]] * 2


class Forked(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.parts["common"](x) + (self.parts["only_0"](x) if both else 0)


def test_sums_need_no_weights() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport, algorithm=GradientAllReduceAlgorithm(average=False))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        seen = []
        for value in ddp.join([1.0] if transport.rank == 0 else [2.0, 4.0]):
            optimizer.zero_grad()
            backward(ddp, value)
            seen.append(ddp.module.weight.grad.item())
            optimizer.step()
        return seen

    assert on_ranks(run, 2) == [[3.0, 4.0]] * 2


@pytest.mark.parametrize("loss", ["part of the module", "parameters alone", "not a number"])
def test_a_replayed_batch_leaves_no_trace_whatever_the_loss(loss: str) -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(nn.Sequential(weight()), transport)
        seen = []
        for index, value in enumerate(ddp.join([10.0] if transport.rank == 0 else [2.0, 4.0])):
            ddp.zero_grad()
            match loss:
                case "part of the module":
                    backward(ddp.module[0], value)
                case "parameters alone":
                    (ddp.module[0].weight * value).sum().backward()
                case "not a number":
                    backward(ddp, float("nan") if index == 1 and transport.rank == 0 else value)
            seen.append(ddp.module[0].weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[6.0, 4.0]] * 2


def test_a_replayed_batch_does_not_train_what_stays_local() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport, ignore=["weight"])
        seen = []
        for value in ddp.join([10.0] if transport.rank == 0 else [2.0, 4.0]):
            ddp.zero_grad()
            backward(ddp, value)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[10.0, 0.0], [2.0, 4.0]]


@pytest.mark.parametrize("breaks", [False, True])
def test_after_the_loop_gradients_flow_again(breaks: bool) -> None:
    def run(transport: Transport) -> tuple[float, bool]:
        ddp = DDP(weight(), transport)
        for index, value in enumerate(ddp.join([10.0] if transport.rank == 0 else [2.0, 4.0, 6.0])):
            backward(ddp, value)
            if breaks and index == 1:
                break
        ddp.zero_grad()
        backward(ddp, transport.rank)
        return ddp.module.weight.grad.item(), bool(ddp.module.weight._backward_hooks)

    assert on_ranks(run, 2) == [(0.5, False)] * 2


# The loop


def test_the_last_batch_is_replayed_as_it_is() -> None:
    def run(transport: Transport) -> list[str]:
        ddp = DDP(weight(), transport)
        return list(ddp.join(["a", "b"] if transport.rank == 0 else ["p", "q", "r", "s"]))

    assert on_ranks(run, 2) == [["a", "b", "b", "b"], ["p", "q", "r", "s"]]


def test_join_draws_batches_one_at_a_time() -> None:
    def run(transport: Transport) -> list[int]:
        drawn = []

        def loader() -> Iterator[int]:
            for index in range(3):
                drawn.append(index)
                yield index

        ddp = DDP(weight(), transport)
        return [len(drawn) - index for index in ddp.join(loader())]

    assert on_ranks(run, 2) == [[1, 1, 1]] * 2


def test_equal_data_is_left_as_it_is() -> None:
    data = [[1.0, 2.0], [3.0, 4.0]]
    assert on_ranks(gradients, 2, data) == [[2.0, 3.0]] * 2


def test_no_data_anywhere_is_an_empty_loop() -> None:
    assert on_ranks(gradients, 2, [[], []]) == [[], []]


def test_a_rank_with_no_batch_at_all_is_an_error_everywhere() -> None:
    for error in errors_on(gradients, 3, [[1.0], [], [2.0, 3.0]]):
        assert isinstance(error, UsageError)
        assert "1 of the ranks have no batch at all" in str(error)


def test_breaking_out_of_the_loop_and_going_on() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []

        def train(value: float) -> None:
            ddp.zero_grad()
            backward(ddp, value)
            seen.append(ddp.module.weight.grad.item())

        for index, value in enumerate(ddp.join([10.0] if transport.rank == 0 else [2.0, 4.0, 6.0, 8.0])):
            if index == 2:
                break  # in the middle of a batch that rank 0 replays
            train(value)
        train(1.0 if transport.rank == 0 else 3.0)  # ordinary data again
        for value in ddp.join([3.0] if transport.rank == 0 else [5.0]):
            train(value)
        return seen

    assert on_ranks(run, 2) == [[6.0, 4.0, 2.0, 4.0]] * 2


def test_epochs() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for epoch in range(3):
            for value in ddp.join([1.0] * (1 + (epoch + transport.rank) % 2)):
                ddp.zero_grad()
                backward(ddp, value)
                seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[1.0] * 6] * 2


def test_a_loop_inside_the_loop_is_refused() -> None:
    def run(transport: Transport) -> None:
        with closing(DDP(weight(), transport)) as ddp:
            for _ in ddp.join([1.0]):
                for _ in ddp.join([1.0]):
                    pass

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "join() is already running" in str(error)


def test_evaluation_inside_the_loop() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for value in ddp.join([1.0] if transport.rank == 0 else [2.0, 4.0]):
            if transport.rank == 0:
                with torch.no_grad():
                    ddp.eval()(number(value))
                ddp.train()
            ddp.zero_grad()
            backward(ddp, value)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[1.5, 4.0]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_weights_in_every_dtype(dtype: torch.dtype) -> None:
    def run(transport: Transport) -> list[complex]:
        ddp = DDP(Scale(torch.ones(1, dtype=dtype)), transport)
        seen = []
        for value in ddp.join([4.0] if transport.rank == 0 else [4.0, 8.0]):
            ddp.zero_grad()
            ddp(torch.full((1,), value, dtype=dtype)).real.sum().backward()
            seen.append(ddp.module.scale.grad.item())
        return seen

    assert on_ranks(run, 2) == [[4.0, 8.0]] * 2
