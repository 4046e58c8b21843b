"""Things done at odd moments: freezing around a change of phase, loading parts, leaving a join, closing late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.models import all_equal, backward, fill, number, on_ranks, values, weight, weights_of
from murmura import (
    DDP,
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    Checkpointer,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    Phased,
    QAdamAlgorithm,
    QAdamOptimizer,
    Transport,
    UsageError,
    run_world,
)
from murmura.types import Exchanges


def mlp(seed: int = 0) -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), seed)


def train(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, rounds: range) -> None:
    for index in rounds:
        optimizer.zero_grad()
        ddp(values(6, 4, seed=1000 * rank + index)).square().mean().backward()
        optimizer.step()


def assert_together(weights: list[Tensor], within: float = 1e-6) -> None:
    for each in weights[1:]:
        torch.testing.assert_close(each, weights[0], rtol=0, atol=within)


@pytest.mark.parametrize("left_out", [0, 1, 4], ids=["first", "warm-up", "later"])
def test_a_step_that_one_rank_must_skip_leaves_no_trace_under_qadam(left_out: int) -> None:
    def run(transport: Transport, rounds: list[int]) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm="qadam", nonfinite="skip_step")) as ddp:
            optimizer = QAdamOptimizer(ddp.module.parameters(), lr=0.01, warmup_steps=2)
            for index in rounds:
                optimizer.zero_grad()
                factor = float("nan") if index == left_out and transport.rank == 0 else 1.0
                (ddp(values(6, 4, seed=index)).square().mean() * factor).backward()
                optimizer.step()
            return weights_of(ddp.module)

    rounds = list(range(6))
    weights = on_ranks(run, 2, rounds) + on_ranks(run, 2, [index for index in rounds if index != left_out])
    assert all_equal([[each] for each in weights])
    assert torch.isfinite(weights[0]).all()


@pytest.mark.parametrize("how", ["in the warm-up", "after it", "under another algorithm"])
def test_a_new_qadam_optimizer_takes_the_place_of_the_one_before(how: str) -> None:
    def run(transport: Transport) -> tuple[str, Tensor]:
        def make() -> QAdamOptimizer:
            return QAdamOptimizer(ddp.module.parameters(), lr=0.01, warmup_steps=2)

        with closing(DDP(mlp(), transport, algorithm="qadam")) as ddp:
            first = make()
            train(ddp, first, transport.rank, range(1 if how == "in the warm-up" else 4))
            second = make()
            if how == "under another algorithm":
                ddp.set_algorithm("gradient_allreduce")
                train(ddp, second, transport.rank, range(4, 5))
                ddp.set_algorithm("qadam")
            if how == "after it":
                with pytest.raises(UsageError, match=r"has not warmed up.*QAdamAlgorithm\(optimizer\)"):
                    train(ddp, second, transport.rank, range(4, 5))
                ddp.set_algorithm(QAdamAlgorithm(second))
            exchanged = []
            for index in range(5, 9):
                exchanged.append(ddp.algorithm.exchanges)
                train(ddp, second, transport.rank, range(index, index + 1))
            assert first.param_groups[0]["num_steps"] < 5
            return ",".join(exchanged), weights_of(ddp.module)

    exchanged, weights = zip(*on_ranks(run, 3), strict=True)
    assert all_equal([[each] for each in weights])
    num_cold = 1 if how == "under another algorithm" else 2
    assert set(exchanged) == {",".join([Exchanges.GRADIENTS] * num_cold + [Exchanges.MOMENTA] * (4 - num_cold))}


@pytest.mark.parametrize("warmup_steps", [2, 3, 5])
@pytest.mark.parametrize("then", ["qadam", "gradient_allreduce"])
@pytest.mark.parametrize("how", ["phase", "switch"])
def test_ranks_that_left_out_steps_apart_warm_up_together(how: str, then: str, warmup_steps: int) -> None:
    def run(transport: Transport) -> Tensor:
        alone = LocalSGDAlgorithm(1)
        algorithm = Phased(alone, 3, then=then) if how == "phase" else alone
        with closing(DDP(mlp(), transport, algorithm=algorithm, nonfinite="skip_step")) as ddp:
            optimizer = QAdamOptimizer(ddp.module.parameters(), lr=0.01, warmup_steps=warmup_steps)
            for index in range(8):
                if index == 3 and how == "switch":
                    ddp.set_algorithm(then)
                optimizer.zero_grad()
                factor = float("nan") if index == transport.rank == 1 else 1.0
                (ddp(values(6, 4, seed=3 * index + transport.rank)).square().mean() * factor).backward()
                optimizer.step()
            return weights_of(ddp.module)

    assert all_equal([[each] for each in on_ranks(run, 3)])


WEIGHTS = [
    DecentralizedAlgorithm(),
    LocalSGDAlgorithm(1),
    DiLoCoAlgorithm(1),
    AsyncModelAverageAlgorithm(sync_interval_rounds=1),
]


@pytest.mark.parametrize("then", WEIGHTS, ids=lambda each: type(each).__name__)
def test_what_is_frozen_when_the_phase_changes_takes_part_when_it_is_thawed(then: Algorithm) -> None:
    def run(transport: Transport) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=Phased(GradientAllReduceAlgorithm(), 2, then=then))) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            ddp.module[0].requires_grad_(False)
            train(ddp, optimizer, transport.rank, range(3))
            ddp.module[0].requires_grad_(True)
            train(ddp, optimizer, transport.rank, range(3, 5))
            optimizer.param_groups[0]["lr"] = 0.0
            train(ddp, optimizer, transport.rank, range(5, 8))
            return weights_of(ddp.module)

    assert_together(on_ranks(run, 2))


@pytest.mark.parametrize(
    "algorithm", [*WEIGHTS[1:3], LowPrecisionDecentralizedAlgorithm()], ids=lambda each: type(each).__name__
)
def test_a_step_that_one_rank_skipped_is_settled_before_a_thawed_parameter_takes_part(algorithm: Algorithm) -> None:
    def run(transport: Transport) -> Tensor:
        model = mlp()
        model[2].requires_grad_(False)
        with closing(DDP(model, transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for index in range(3):
                optimizer.zero_grad()
                hidden = torch.nn.functional.linear(values(6, 4, seed=3 * transport.rank + index), model[0].weight)
                torch.nn.functional.linear(hidden, model[2].weight).square().mean().backward()  # past all forwards
                if index or transport.rank:
                    optimizer.step()
                model[2].requires_grad_(True)
            ddp.settle()
            with ddp.average_parameters():
                return weights_of(model)

    assert_together(on_ranks(run, 2))


GRADIENTS = [
    GradientAllReduceAlgorithm(),
    GradientAllReduceAlgorithm(compressor=ErrorFeedback(MinMaxUInt8())),
]


@pytest.mark.parametrize("then", GRADIENTS, ids=["plain", "with feedback"])
@pytest.mark.parametrize("how", ["phase", "switch"])
def test_what_is_thawed_just_before_the_algorithm_changes_takes_part(then: Algorithm, how: str) -> None:
    def run(transport: Transport) -> Tensor:
        model = mlp()
        model[0].requires_grad_(False)
        first = GradientAllReduceAlgorithm()
        with closing(DDP(model, transport, algorithm=Phased(first, 2, then=then) if how == "phase" else first)) as ddp:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train(ddp, optimizer, transport.rank, range(2))
            model[0].requires_grad_(True)
            if how == "switch":
                ddp.set_algorithm(then)
            train(ddp, optimizer, transport.rank, range(2, 4))
            return weights_of(model)

    assert_together(on_ranks(run, 2), within=0.0)


@pytest.mark.parametrize("algorithm", WEIGHTS, ids=lambda each: type(each).__name__)
def test_layers_that_take_turns_in_being_frozen_stay_together(algorithm: Algorithm) -> None:
    def run(transport: Transport) -> Tensor:
        model = mlp()
        model[2].requires_grad_(False)
        with closing(DDP(model, transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for index, (first, second) in enumerate([(True, False), (False, True), (True, True)]):
                model[0].requires_grad_(first)
                model[2].requires_grad_(second)
                train(ddp, optimizer, transport.rank, range(index, index + 1))
            optimizer.param_groups[0]["lr"] = 0.0
            train(ddp, optimizer, transport.rank, range(3, 8))
            return weights_of(model)

    assert_together(on_ranks(run, 2))


def test_a_backward_that_reaches_thawed_parameters_only_is_a_round() -> None:
    def run(transport: Transport) -> Tensor:
        model = mlp().requires_grad_(False)
        with closing(DDP(model, transport)) as ddp:
            model.requires_grad_(True).eval()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train(ddp, optimizer, transport.rank, range(2))
            return weights_of(model)

    assert all_equal([[each] for each in on_ranks(run, 2)])


@pytest.mark.parametrize("algorithm", [DiLoCoAlgorithm(1), LowPrecisionDecentralizedAlgorithm()])
def test_ranks_that_load_weights_of_their_own_come_together(algorithm: Algorithm) -> None:
    def run(transport: Transport) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.0)
            ddp.load_state_dict(mlp(5 + transport.rank).state_dict())
            train(ddp, optimizer, transport.rank, range(20))
            return weights_of(ddp.module)

    assert_together(on_ranks(run, 2), within=1e-4)


def test_a_part_that_loads_restarts_what_is_derived_from_weights() -> None:
    def run(transport: Transport) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=DiLoCoAlgorithm(1))) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.0)
            train(ddp, optimizer, transport.rank, range(1))
            ddp.module[0].load_state_dict(mlp(7)[0].state_dict())
            train(ddp, optimizer, transport.rank, range(1, 3))
            return ddp.module[0].weight.detach().clone()

    for loaded in on_ranks(run, 2):
        torch.testing.assert_close(loaded, mlp(7)[0].weight.detach())


@pytest.mark.parametrize("in_eval", [False, True])
def test_a_join_that_was_left_weighs_nothing_afterwards(in_eval: bool) -> None:
    def run(transport: Transport) -> float:
        with closing(DDP(weight(), transport)) as ddp:
            ddp.train(not in_eval)
            for index, _ in enumerate(ddp.join([1, 2, 3] if transport.rank == 0 else [1])):
                if index == 1:
                    break  # rank 1 replays
            backward(ddp, transport.rank + 1)
            return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [1.5, 1.5]


def test_a_replayed_batch_gives_thawed_parameters_nothing() -> None:
    def run(transport: Transport) -> float:
        model = nn.Sequential(weight(), weight().requires_grad_(False))
        with closing(DDP(model, transport)) as ddp:
            for index, each in enumerate(ddp.join([1.0, 2.0] if transport.rank == 0 else [1.0])):
                model[1].requires_grad_(index == 1)
                ddp.zero_grad()
                backward(ddp, each)
            return model[1].weight.grad.item()

    assert on_ranks(run, 2) == [2.0, 2.0]


def test_a_look_at_the_output_decides_nothing_for_a_part() -> None:
    def run(transport: Transport) -> float:
        with closing(DDP(nn.Sequential(weight()), transport)) as ddp:
            with ddp.no_sync():
                ddp(number(1))
            backward(ddp.module[0], transport.rank)
            return ddp.module[0].weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["decentralized", "async"])
def test_a_forward_that_is_recomputed_writes_nothing(name: str, use_reentrant: bool) -> None:
    algorithm: Any = AsyncModelAverageAlgorithm(sync_interval_rounds=1) if name == "async" else name

    def run(transport: Transport, recomputes: bool) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            first, _, last = ddp.module
            for index in range(3):
                optimizer.zero_grad()
                batches = [values(3, 4, seed=10 * index + k + 100 * transport.rank).requires_grad_() for k in range(2)]
                through = (
                    (lambda x: checkpoint(lambda y: last(first(y)), x, use_reentrant=use_reentrant))
                    if recomputes
                    else (lambda x: last(first(x)))
                )
                for out in [through(each) for each in batches]:
                    out.mean().backward()
                optimizer.step()
            return weights_of(ddp.module)

    for plain, recomputed in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize("algorithm", [DecentralizedAlgorithm(), GradientAllReduceAlgorithm(), LocalSGDAlgorithm(2)])
def test_rolling_back_inside_a_round_begins_it_anew(algorithm: Algorithm, tmp_path: Path) -> None:
    def run(transport: Transport, looks: bool) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            checkpointer = Checkpointer(tmp_path / str(looks))
            train(ddp, optimizer, transport.rank, range(2))
            checkpointer.save(2, ddp=ddp, optimizer=optimizer)
            train(ddp, optimizer, transport.rank, range(2, 3))
            if looks:
                ddp(values(6, 4, seed=9))  # its loss was not finite: no backward
            checkpointer.load(ddp=ddp, optimizer=optimizer)
            train(ddp, optimizer, transport.rank, range(2, 5))
            return weights_of(ddp.module)

    for plain, looked in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(plain, looked)


@pytest.mark.parametrize("algorithm", [LocalSGDAlgorithm(1), DecentralizedAlgorithm()])
def test_closing_in_an_exception_handler_settles_too(algorithm: Algorithm) -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport, algorithm=algorithm)
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
        batches: Iterator[int] = iter([1])
        while True:
            try:
                next(batches)
            except StopIteration:
                ddp.close()
                return ddp.module.weight.item()
            backward(ddp, transport.rank)
            if transport.rank == 1:
                optimizer.step()

    first, second = run_world(run, 2, timeout=5)
    assert first == pytest.approx(second, abs=0.11)


@pytest.mark.parametrize("name", ["decentralized", "local_sgd", "gradient_allreduce"])
def test_a_checkpoint_between_forward_and_backward_leaves_the_graph_valid(name: str, tmp_path: Path) -> None:
    def run(transport: Transport) -> None:
        with closing(DDP(mlp(), transport, algorithm=name)) as ddp:
            loss = ddp(values(6, 4, seed=transport.rank)).square().mean()
            Checkpointer(tmp_path).save(1, ddp=ddp)
            loss.backward()

    on_ranks(run, 2)


def test_a_module_that_contains_a_wrapper_loads_its_own_state() -> None:
    def run(transport: Transport) -> bool:
        with closing(DDP(mlp(), transport)) as ddp:
            whole = nn.ModuleDict({"net": ddp, "head": nn.Linear(3, 1)})
            state = {name: torch.ones_like(each) for name, each in whole.state_dict().items()}
            whole.load_state_dict(state)
            return bool((weights_of(whole) == 1).all())

    assert on_ranks(run, 2) == [True, True]


def test_a_run_resumes_with_layers_frozen_as_they_were_when_it_was_saved(tmp_path: Path) -> None:
    def run(transport: Transport, resumes: bool) -> Tensor:
        model = mlp()
        model[0].requires_grad_(not resumes)
        with closing(DDP(model, transport)) as ddp:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            checkpointer = Checkpointer(tmp_path)
            if resumes:
                checkpointer.load(ddp=ddp, optimizer=optimizer)
            else:
                train(ddp, optimizer, transport.rank, range(1))
                model[0].requires_grad_(False)
                train(ddp, optimizer, transport.rank, range(1, 2))
                checkpointer.save(2, ddp=ddp, optimizer=optimizer)
            train(ddp, optimizer, transport.rank, range(2, 4))
            return weights_of(model)

    for whole, resumed in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(whole, resumed)


def test_error_feedback_resumes_with_another_size_of_buckets(tmp_path: Path) -> None:
    algorithm = ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8()))

    def run(transport: Transport, resumes: bool) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=algorithm, bucket_size_bytes=64 if resumes else 2**20)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            checkpointer = Checkpointer(tmp_path)
            if resumes:
                checkpointer.load(ddp=ddp, optimizer=optimizer)
            else:
                train(ddp, optimizer, transport.rank, range(2))
                checkpointer.save(2, ddp=ddp, optimizer=optimizer)
            train(ddp, optimizer, transport.rank, range(2, 4))
            return weights_of(ddp.module)

    for whole, resumed in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(whole, resumed)


@pytest.mark.parametrize("as_views", [True, False])
def test_a_gradient_whose_data_were_replaced_is_averaged_in_the_next_round(as_views: bool) -> None:
    def run(transport: Transport) -> list[float]:
        model = nn.Linear(2, 1, bias=False)
        found = []
        with closing(DDP(model, transport, gradient_as_bucket_view=as_views)) as ddp:
            for _ in range(3):
                model.zero_grad(set_to_none=False)
                ddp(torch.full((1, 2), float(transport.rank + 1))).sum().backward()
                assert model.weight.grad is not None
                found.append(model.weight.grad[0, 0].item())
                model.weight.grad.data = model.weight.grad.data * 1.0  # takes the view itself out of the bucket
        return found

    assert run_world(run, 2) == [[1.5] * 3] * 2
