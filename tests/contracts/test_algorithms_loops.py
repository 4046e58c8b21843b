"""Training loops of all kinds under every algorithm: each must come to what the plain loop comes to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from contracts.catalogue import Entry, every
from contracts.training import assert_close, by_step, regression, spread, step, train_world
from ddp.models import on_ranks
from murmura import DDP, Transport
from oracles.algorithms.simulation import Task, flat_of

SIZE = 3
STEPS = 4


def plain(entry: Entry, task: Task) -> list[list[Tensor]]:
    return by_step(train_world(SIZE, entry.make(), task, STEPS))


def looped(entry: Entry, task: Task, loop: Callable[[DDP, Task, int], list[Tensor]]) -> list[list[Tensor]]:
    """The flats by step and rank that `loop` returns on each rank."""

    def visit(transport: Transport) -> list[Tensor]:
        ddp = DDP(task.make_model(), transport, algorithm=entry.make())
        flats = loop(ddp, task, transport.rank)
        ddp.close()
        return flats

    return [list(each) for each in zip(*on_ranks(visit, SIZE), strict=True)]


def synchronised_by_hand(ddp: DDP, task: Task, rank: int) -> list[Tensor]:
    optimizer = task.make_optimizer(ddp.parameters())
    flats = []
    for number in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            task.backward(ddp, number, rank)
        ddp.sync_gradients()
        ddp.overlapped_sync_gradients()  # in sync already: nothing happens
        optimizer.step()
        flats.append(flat_of(ddp.module))
    return flats


@every()
def test_a_round_may_be_synchronised_by_hand(entry: Entry) -> None:
    task = entry.fit(regression("momentum", torch.float32))
    assert_close(looped(entry, task, synchronised_by_hand), plain(entry, task), within=0.0)


def with_two_optimizers(ddp: DDP, task: Task, rank: int) -> list[Tensor]:
    parameters = list(ddp.parameters())
    optimizers = [task.make_optimizer(parameters[::2]), task.make_optimizer(parameters[1::2])]
    flats = []
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        task.backward(ddp, number, rank)
        for optimizer in optimizers:
            optimizer.step()
        flats.append(flat_of(ddp.module))
    return flats


@every(lambda entry: entry.optimizer is None)
def test_two_optimizers_are_one(entry: Entry) -> None:
    task = regression("adam", torch.float32)
    assert_close(looped(entry, task, with_two_optimizers), plain(entry, task), within=0.0)


@every()
def test_models_that_take_turns_do_not_meet(entry: Entry) -> None:
    """Two wrappers of one declaration, on one transport."""
    task = entry.fit(regression("momentum", torch.float32))

    def visit(transport: Transport) -> list[list[Tensor]]:
        algorithm = entry.make()
        wrappers = [DDP(task.make_model(), transport, algorithm=algorithm) for _ in range(2)]
        optimizers = [task.make_optimizer(ddp.parameters()) for ddp in wrappers]
        flats: list[list[Tensor]] = [[], []]
        for number in range(2 * STEPS):
            ddp, optimizer = wrappers[number % 2], optimizers[number % 2]
            step(ddp, optimizer, task, number // 2, transport.rank)
            flats[number % 2].append(flat_of(ddp.module))
        for ddp in wrappers:
            ddp.close()
        return flats

    by_rank = on_ranks(visit, SIZE)
    for which in range(2):
        got = [list(each) for each in zip(*(flats[which] for flats in by_rank), strict=True)]
        assert_close(got, plain(entry, task), within=0.0)


@every(in_pairs=True)
def test_uneven_data_holds_nobody_up(entry: Entry) -> None:
    """Ranks have 2, 4 and 6 batches; all take six steps, and those that share their steps stay equal."""
    task = entry.fit(regression("sgd", torch.float32))

    def visit(transport: Transport) -> list[Tensor]:
        ddp = DDP(task.make_model(), transport, algorithm=entry.make())
        optimizer = task.make_optimizer(ddp.parameters())
        batches = [task.shard(number, 0, transport.rank) for number in range(2 * transport.rank + 2)]
        flats = []
        for batch in ddp.join(batches):
            optimizer.zero_grad()
            task.loss(ddp, batch).backward()
            optimizer.step()
            flats.append(flat_of(ddp.module))
        ddp.close()
        return flats

    flats = [list(each) for each in zip(*on_ranks(visit, SIZE), strict=True)]
    assert len(flats) == 6
    assert all(bool(torch.isfinite(flat).all()) for each in flats for flat in each)
    assert not entry.lockstep or all(spread(each) == 0 for each in flats)


@every()
def test_gradients_kept_as_zeros_change_nothing(entry: Entry) -> None:
    """zero_grad(set_to_none=False) keeps the tensors that gradients live in."""

    def keeping(ddp: DDP, task: Task, rank: int) -> list[Tensor]:
        optimizer = task.make_optimizer(ddp.parameters())
        flats = []
        for number in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            task.backward(ddp, number, rank)
            optimizer.step()
            flats.append(flat_of(ddp.module))
        return flats

    task = entry.fit(regression("momentum", torch.float32))
    assert_close(looped(entry, task, keeping), plain(entry, task), within=0.0)


@every()
def test_a_learning_rate_that_a_scheduler_changes(entry: Entry) -> None:
    """The optimizer stays the user's: a schedule acts as it does on every rank alone."""

    def scheduled(ddp: DDP, task: Task, rank: int) -> list[Tensor]:
        optimizer = task.make_optimizer(ddp.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.0 if number >= 3 else 1.0)
        flats = []
        for number in range(STEPS):
            step(ddp, optimizer, task, number, rank)
            schedule.step()
            flats.append(flat_of(ddp.module))
        return flats

    task = entry.fit(regression("sgd", torch.float32))
    flats, usual = looped(entry, task, scheduled), plain(entry, task)
    assert_close(flats[:3], usual[:3], within=0.0)
    if entry.lockstep:
        assert_close(flats[3:], [flats[2]], within=0.0)  # at rate 0 nothing moves
