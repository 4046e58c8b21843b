"""Rounds: accumulation, manual synchronisation, several forwards and backwards, checkpointing, half-done backwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp.models import (
    Heads,
    all_equal,
    backward,
    errors_on,
    fill,
    gradients_of,
    number,
    on_ranks,
    values,
    weight,
)
from murmura import DDP, CollectiveMismatch, MurmuraError, PeerTimeout, Transport, TransportError, UsageError
from oracles import ddp as oracle

Sync = Callable[[DDP], None]
SYNCS = pytest.mark.parametrize("sync", [DDP.sync_gradients, DDP.overlapped_sync_gradients], ids=["one", "all"])


def rounds_of(ddp: DDP) -> int:
    return ddp.algorithm_state_dict()["round"]


# no_sync


def test_no_sync_accumulates_and_the_next_backward_brings_it_all() -> None:
    def run(transport: Transport) -> tuple[float, float, int]:
        ddp = DDP(weight(), transport)
        with ddp.no_sync():
            backward(ddp, transport.rank)
            backward(ddp, 10 * transport.rank)
        alone = ddp.module.weight.grad.item()
        backward(ddp, 100 * transport.rank)
        return alone, ddp.module.weight.grad.item(), rounds_of(ddp)

    assert on_ranks(run, 3) == [(0.0, 111.0, 1), (11.0, 111.0, 1), (22.0, 111.0, 1)]


def test_ranks_may_accumulate_differently() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for _ in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                for _ in range(transport.rank):
                    backward(ddp, 1)
            backward(ddp, 1)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 3) == [[2.0] * 3] * 3


def test_no_sync_nests_and_ends_with_an_exception() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        with ddp.no_sync():
            with ddp.no_sync():
                backward(ddp, transport.rank)
            backward(ddp, transport.rank)  # still inside the outer one
            assert ddp.module.weight.grad.item() == 2 * transport.rank
        with pytest.raises(KeyError), ddp.no_sync():
            raise KeyError
        backward(ddp, transport.rank)
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [1.5, 1.5]


def test_no_sync_around_nothing_is_no_round() -> None:
    def run(transport: Transport) -> int:
        ddp = DDP(weight(), transport)
        with ddp.no_sync():
            pass
        ddp.sync_gradients()
        return rounds_of(ddp)

    assert on_ranks(run, 2) == [0, 0]


# Manual synchronisation


@SYNCS
def test_manual_synchronisation(sync: Sync) -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for step in range(3):
            ddp.zero_grad()
            with ddp.no_sync():
                backward(ddp, step + transport.rank)
            sync(ddp)
            sync(ddp)  # in sync already: nothing happens
            seen.append(ddp.module.weight.grad.item())
        assert rounds_of(ddp) == 3
        return seen

    assert on_ranks(run, 2) == [[0.5, 1.5, 2.5]] * 2


@SYNCS
def test_the_loop_of_module_backward_sync_step(sync: Sync) -> None:
    """The inner module is called, backward synchronises, and the explicit call finds nothing to do."""

    def run(transport: Transport) -> tuple[float, int]:
        ddp = DDP(weight(4.0), transport)
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            output = ddp.module(number(transport.rank))
            output.sum().backward()
            sync(ddp)
            optimizer.step()
        return ddp.module.weight.item(), rounds_of(ddp)

    assert on_ranks(run, 3) == [(1.0, 3)] * 3


@SYNCS
def test_synchronising_inside_no_sync_is_refused(sync: Sync) -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(weight(), transport)
        with ddp.no_sync():
            backward(ddp, 1)
            sync(ddp)

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "after the block" in str(error)


@SYNCS
def test_ranks_may_synchronise_in_different_ways(sync: Sync) -> None:
    """A round is a round, however a rank comes to it."""

    def run(transport: Transport) -> list[float]:
        ddp = DDP(fill(Heads()), transport, bucket_size_bytes=1)
        seen = []
        for step in range(4):
            ddp.zero_grad()
            x = values(3, 4, seed=10 * step + transport.rank)
            if transport.rank == step % 3:
                with ddp.no_sync():
                    ddp(x, use=[1, 0]).sum().backward()
                sync(ddp)
            else:
                ddp(x, use=[0, 1]).sum().backward()
            seen.append(gradients_of(ddp.module))
        return seen

    assert all_equal(on_ranks(run, 3))


@SYNCS
def test_a_forward_without_backward_can_be_synchronised(sync: Sync) -> None:
    """A rank whose loss was not worth a backward still takes part in the round."""

    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        with ddp.no_sync():
            loss = ddp(number(8)).sum()
            if transport.rank == 0:
                loss.backward()
        sync(ddp)
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [4.0, 4.0]


# Several forwards and backwards


def test_several_forwards_before_one_backward() -> None:
    def run(transport: Transport) -> tuple[float, int]:
        ddp = DDP(weight(), transport)
        (ddp(number(transport.rank)) + ddp(number(2)) + ddp.module(number(10))).sum().backward()
        return ddp.module.weight.grad.item(), rounds_of(ddp)

    assert on_ranks(run, 2) == [(12.5, 1)] * 2


def test_two_forwards_then_two_backwards() -> None:
    def run(transport: Transport) -> tuple[float, float, int]:
        ddp = DDP(weight(), transport)
        first, second = ddp(number(transport.rank)), ddp(number(10 * transport.rank))
        first.sum().backward()
        after_one = ddp.module.weight.grad.item()
        second.sum().backward()
        return after_one, ddp.module.weight.grad.item(), rounds_of(ddp)

    assert on_ranks(run, 2) == [(0.5, 5.5, 2)] * 2


def test_two_backwards_through_one_graph() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        loss = ddp(number(transport.rank)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [1.0, 1.0]


def test_a_part_of_the_module_may_be_called() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(nn.Sequential(weight(), nn.ReLU()), transport)
        ddp.module[0](number(transport.rank)).sum().backward()
        return ddp.module[0].weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def test_a_loss_on_the_parameters_alone() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(3.0), transport)
        (transport.rank * ddp.module.weight).sum().backward()
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def test_a_model_in_eval_mode_trains_too() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport).eval()
        seen = []
        for step in range(2):
            ddp.zero_grad()
            backward(ddp, transport.rank + step)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[0.5, 1.5]] * 2


def test_evaluation_on_one_rank_alone_is_no_round() -> None:
    def run(transport: Transport) -> tuple[float, int]:
        ddp = DDP(nn.Sequential(weight(), nn.BatchNorm1d(1)), transport)
        x = torch.tensor([[1.0], [2.0 + transport.rank]])
        for _ in range(2):
            if transport.rank == 0:
                with torch.no_grad():
                    ddp(x)
                ddp.eval()(x)
                ddp.train()
            ddp(x).square().sum().backward()
        return rounds_of(ddp)

    assert on_ranks(run, 2) == [2, 2]


def test_torch_autograd_grad_is_no_round() -> None:
    """A gradient penalty, on one rank only."""

    def run(transport: Transport) -> tuple[float, int]:
        ddp = DDP(weight(2.0), transport)
        penalty = torch.zeros(())
        if transport.rank == 0:
            x = number(3).requires_grad_()
            (slope,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
            penalty = slope.square().sum()  # w^2
        (ddp(number(1)).sum() + penalty).backward()
        return ddp.module.weight.grad.item(), rounds_of(ddp)

    assert on_ranks(run, 2) == [((1 + 4 + 1) / 2, 1)] * 2


# Checkpointing


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.head):  # to the very end: backward begins inside a checkpoint
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Plain(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("bucket_size_bytes", [1, 2**20])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool, bucket_size_bytes: int) -> None:
    def batch(step: int, rank: int) -> Tensor:
        return values(3, 4, seed=10 * step + rank).requires_grad_()

    def run(transport: Transport) -> tuple[list[dict[str, Tensor | None]], int]:
        ddp = DDP(fill(Checkpointed(use_reentrant)), transport, bucket_size_bytes=bucket_size_bytes)
        seen = []
        for step in range(3):
            ddp.zero_grad()
            ddp(batch(step, transport.rank)).square().mean().backward()
            seen.append(gradients_of(ddp.module))
        return seen, rounds_of(ddp)

    results = on_ranks(run, 2)
    assert all_equal(results)
    gradients, num_rounds = results[0]
    assert num_rounds == 3
    for step, seen in enumerate(gradients):
        inputs = [batch(step, rank) for rank in range(2)]
        losses = [lambda model, x=x: model(x).square().mean() for x in inputs]
        wanted = oracle.mean_gradients(fill(Plain(use_reentrant)), losses)
        for name, gradient in seen.items():
            torch.testing.assert_close(gradient, wanted[name])


class Twice(nn.Module):
    """One block run twice, each time in a checkpoint of its own."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.block = weight(2.0)
        self.before = weight(3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return x


def test_a_block_run_twice_in_checkpoints_that_are_not_reentrant() -> None:
    def run(transport: Transport) -> tuple[float, float]:
        ddp = DDP(Twice(False), transport, bucket_size_bytes=1)
        backward(ddp, transport.rank)
        return ddp.module.block.weight.grad.item(), ddp.module.before.weight.grad.item()

    assert on_ranks(run, 2) == [(2 * 2 * 3 / 2, 2 * 2 / 2)] * 2


def test_a_block_run_twice_in_reentrant_checkpoints_is_refused_by_name_once_its_bucket_left() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(Twice(True), transport, bucket_size_bytes=1)
        x = number(transport.rank).requires_grad_()
        for _ in range(2):  # at the latest with the buckets in the order seen
            ddp(x).sum().backward()

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "'block.weight' got a second gradient" in str(error)
        assert "use_reentrant=False" in str(error)


@pytest.mark.parametrize("sync", [DDP.sync_gradients, DDP.overlapped_sync_gradients], ids=["one", "all"])
def test_a_block_run_twice_in_reentrant_checkpoints_works_by_hand(sync: Sync) -> None:
    def run(transport: Transport) -> tuple[float, float]:
        ddp = DDP(Twice(True), transport, bucket_size_bytes=1)
        with ddp.no_sync():
            ddp(number(transport.rank).requires_grad_()).sum().backward()
        sync(ddp)
        return ddp.module.block.weight.grad.item(), ddp.module.before.weight.grad.item()

    assert on_ranks(run, 2) == [(6.0, 2.0)] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_whole_wrapper_in_a_checkpoint(use_reentrant: bool) -> None:
    def run(transport: Transport) -> tuple[float, int]:
        ddp = DDP(nn.Sequential(weight(2.0), nn.BatchNorm1d(1, affine=False), weight(1.0)), transport)
        for _ in range(2):
            ddp.zero_grad()
            x = torch.tensor([[1.0], [3.0]]).requires_grad_()
            checkpoint(ddp, x * (transport.rank + 1), use_reentrant=use_reentrant).pow(3).sum().backward()
        gradients = [parameter.grad.clone() for parameter in ddp.parameters()]
        ddp.verify_in_sync()
        return gradients, rounds_of(ddp)

    results = on_ranks(run, 2)
    assert all_equal(results)
    assert results[0][1] == 2


# Backwards that raise


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in the middle of backward")


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = weight(), weight()
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(Raising.apply(x) if self.breaks else x)


def test_after_a_backward_that_raised_with_a_bucket_sent_the_next_forward_is_refused() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(Fragile(), transport, bucket_size_bytes=1)
        backward(ddp, 1)
        ddp.module.breaks = True
        with pytest.raises(ArithmeticError, match="middle of backward"):
            backward(ddp, 1)
        ddp.module.breaks = False
        ddp.zero_grad()
        ddp(number(1))

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "forward was called while the round of an earlier backward is unfinished" in str(error)


def test_a_backward_that_raised_before_a_bucket_was_sent_can_be_tried_again() -> None:
    """Some gradients have come, but none has left this rank."""

    def run(transport: Transport) -> list[float]:
        with closing(DDP(Fragile(), transport, bucket_size_bytes=2**20)) as ddp:
            if transport.rank == 1:
                ddp.module.breaks = True
                with pytest.raises(ArithmeticError, match="middle of backward"):
                    backward(ddp, 100)
                ddp.module.breaks = False
                ddp.zero_grad()
            backward(ddp, 1)
            return [parameter.grad.item() for parameter in ddp.parameters() if parameter.grad is not None]

    first, second = on_ranks(run, 2)
    assert first == second
    assert first


def test_a_backward_that_raised_before_any_gradient_can_be_tried_again() -> None:
    """Nothing has left this rank, so it may still bring the gradients of another batch."""

    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for step in range(3):
            ddp.zero_grad()
            if transport.rank == 1 and step == 1:
                out = ddp(number(100))
                with pytest.raises(ArithmeticError):
                    Raising.apply(out).sum().backward()

                def refuse(gradient: Tensor) -> None:
                    raise ArithmeticError

                out = ddp(number(100))
                out.register_hook(refuse)  # runs after the wrapper's own hook on the output
                with pytest.raises(ArithmeticError):
                    out.sum().backward()
            backward(ddp, step + transport.rank)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[0.5, 1.5, 2.5]] * 2


def test_a_backward_that_raised_inside_no_sync_can_be_tried_again() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(Fragile(), transport, bucket_size_bytes=1)
        ddp.module.breaks = True
        with ddp.no_sync(), pytest.raises(ArithmeticError):
            backward(ddp, 1)
        ddp.module.breaks = False
        ddp.zero_grad()
        backward(ddp, transport.rank)
        return ddp.module.first.weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def test_pytorch_68297_an_unfinished_backward_then_another_collective_ends_in_an_error() -> None:
    """One rank's backward raises and it goes on to a collective of its own; nobody may hang."""

    def run(transport: Transport) -> tuple[type[Exception], float]:
        transport.timeout = 1.0
        with closing(DDP(Fragile(), transport, bucket_size_bytes=1)) as ddp:
            ddp.module.breaks = transport.rank == 0
            began = time.monotonic()
            try:
                try:
                    backward(ddp, 1)
                except ArithmeticError:
                    transport.barrier()
            except MurmuraError as error:
                return type(error), time.monotonic() - began
        raise AssertionError("no error")

    for kind, seconds in on_ranks(run, 2):
        assert issubclass(kind, TransportError)
        assert seconds < 15


def test_a_round_that_a_peer_does_not_come_to_ends_at_the_deadline_and_names_the_bucket() -> None:
    def run(transport: Transport) -> str:
        transport.timeout = 0.5
        with closing(DDP(Fragile(), transport, bucket_size_bytes=1)) as ddp:
            if transport.rank == 1:
                with pytest.raises(TransportError):
                    transport.barrier(timeout=20)  # until rank 0 has given up
                return ""
            with pytest.raises(PeerTimeout) as refusal:
                backward(ddp, 1)
            return "\n".join([str(refusal.value), *refusal.value.__notes__])

    told = on_ranks(run, 2)[0]
    assert "rank 0 waited" in told
    assert "for rank 1" in told
    assert "bucket 0 (first parameter 'second.weight') of round 0" in told


def test_ranks_that_run_different_numbers_of_backwards_are_told() -> None:
    def run(transport: Transport) -> None:
        transport.timeout = 2.0
        with closing(DDP(weight(), transport)) as ddp:
            for _ in range(3 + transport.rank):
                backward(ddp, 1)
            ddp.verify_in_sync()

    for error in errors_on(run, 2):
        assert isinstance(error, MurmuraError)


def test_buckets_of_another_round_are_told_apart() -> None:
    """Equal in size and dtype, so that only the fingerprint in the tail can tell."""

    def run(transport: Transport) -> str:
        with closing(DDP(weight(), transport)) as ddp:
            ddp._replica.round += transport.rank  # as if rank 1 had missed one
            with pytest.raises(CollectiveMismatch, match="another round or layout") as refusal:
                backward(ddp, 1)
            return str(refusal.value)

    for rank, told in enumerate(on_ranks(run, 2)):
        assert f"rank {rank}: in round {rank}, the buckets (first parameter 'weight')" in told
