"""One rank skips its optimizer's step, as GradScaler makes it, and the others do not: nobody waits for luck."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp.models import all_equal, fill, number, on_ranks, values, weight
from murmura import (
    DDP,
    Algorithm,
    Checkpointer,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PeerTimeout,
    PushSumAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    StreamingDiLoCoAlgorithm,
    Transport,
    TransportError,
    average_losses,
    run_world,
)
from worlds import SECONDS

AFTER_STEP = {
    "local_sgd": LocalSGDAlgorithm(1),
    "diloco": DiLoCoAlgorithm(1),
    "low_precision": LowPrecisionDecentralizedAlgorithm(),
    "push_sum": PushSumAlgorithm(),
    "streaming_diloco": StreamingDiLoCoAlgorithm(1, fragments=1, overlap=1, compressor=None),
}
DIFFER = ("low_precision", "streaming_diloco")  # replicas that are not equal after every exchange

Point = Callable[[DDP, Transport, Path], object]
POINTS: dict[str, Point] = {
    "average_losses": lambda ddp, transport, folder: average_losses(transport, 1.0, 1),
    "all_reduce": lambda ddp, transport, folder: transport.all_reduce(torch.ones(1)),
    "barrier": lambda ddp, transport, folder: transport.barrier(),
    "a channel": lambda ddp, transport, folder: transport.channel("metrics").all_reduce(torch.ones(1)),
    "join": lambda ddp, transport, folder: [None for _ in ddp.join([1])],
    "save": lambda ddp, transport, folder: Checkpointer(folder).save(1, ddp=ddp),
    "consensus": lambda ddp, transport, folder: ddp.consensus_distance(),
    "set_algorithm": lambda ddp, transport, folder: ddp.set_algorithm("gradient_allreduce"),
    "close": lambda ddp, transport, folder: ddp.close(),
    "another model": lambda ddp, transport, folder: DDP(weight(), transport).close(),
}


def step(ddp: DDP, optimizer: torch.optim.Optimizer, value: float, *, skip: bool = False) -> None:
    optimizer.zero_grad()
    ddp(values(2, 4, seed=int(value))).square().mean().backward()
    if not skip:
        optimizer.step()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("name", AFTER_STEP)
def test_a_rank_that_skips_joins_the_others_before_it_waits_for_them(name: str, point: str, tmp_path: Path) -> None:
    def run(transport: Transport) -> list[torch.Tensor]:
        ddp = DDP(fill(nn.Linear(4, 2)), transport, algorithm=AFTER_STEP[name])
        with closing(ddp):
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            step(ddp, optimizer, transport.rank)
            step(ddp, optimizer, transport.rank, skip=transport.rank == 1)
            POINTS[point](ddp, transport, tmp_path)
            return [each.detach().clone() for each in ddp.module.parameters()]

    weights = run_world(run, 2, timeout=5)
    if name not in DIFFER:
        assert all_equal(weights)


WAITS: dict[str, Callable[[DDP], object]] = {
    "state": lambda ddp: ddp.algorithm_state_dict(),
    "load": lambda ddp: ddp.module.load_state_dict(ddp.module.state_dict()),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("moments", [False, True])
def test_a_rank_that_waits_for_a_fragment_gets_that_of_one_that_skips(wait: str, moments: bool) -> None:
    """Rank 0 has sent its fragment and waits for the outcome; rank 1 comes to a barrier, its step skipped."""

    def run(transport: Transport) -> None:
        algorithm = StreamingDiLoCoAlgorithm(4, fragments=1, overlap=2, compressor=None, average_moments=moments)
        with closing(DDP(fill(nn.Linear(4, 2)), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            step(ddp, optimizer, transport.rank)
            step(ddp, optimizer, transport.rank, skip=transport.rank == 1)
            if transport.rank == 0:
                WAITS[wait](ddp)
            transport.barrier()

    run_world(run, 2, timeout=5)


@pytest.mark.parametrize("name", AFTER_STEP)
def test_a_collective_between_backward_and_step_does_not_exchange_early(name: str) -> None:
    """The loss is often averaged there: it must not count as a step that was skipped."""

    def run(transport: Transport, logs: bool) -> torch.Tensor:
        ddp = DDP(fill(nn.Linear(4, 2)), transport, algorithm=AFTER_STEP[name])
        with closing(ddp):
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            for index in range(3):
                optimizer.zero_grad()
                ddp(values(2, 4, seed=10 * index + transport.rank)).square().mean().backward()
                if logs:
                    average_losses(transport, 1.0, 1)
                    ddp.consensus_distance()
                optimizer.step()
            return ddp.module.weight.detach().clone()

    for plain, logged in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(plain, logged)


def test_two_models_of_one_world_settle_for_each_other() -> None:
    """As in a GAN: rank 1 skips a step of the first model, and then trains the second."""

    def run(transport: Transport) -> float:
        first = DDP(weight(), transport, algorithm=LocalSGDAlgorithm(1))
        second = DDP(nn.BatchNorm1d(1), transport)
        with closing(first), closing(second):
            optimizer = torch.optim.SGD(first.module.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                first(number(transport.rank)).sum().backward()
                if transport.rank == 0:
                    optimizer.step()
                second(torch.ones(2, 1)).sum().backward()
            return first.module.weight.item()

    first, second = run_world(run, 2, timeout=5)
    assert first == second


def test_all_ranks_skip_what_one_skips_under_qadam() -> None:
    def run(transport: Transport) -> list[float]:
        with closing(DDP(weight(), transport, algorithm=QAdamAlgorithm())) as ddp:
            optimizer = QAdamOptimizer(ddp.module.parameters(), lr=0.1, warmup_steps=2)
            seen = []
            for index in range(6):
                optimizer.zero_grad()
                ddp(number(1 + transport.rank)).sum().backward()
                if index != 3 or transport.rank != 1:
                    optimizer.step()
                average_losses(transport, 1.0, 1)
                seen.append(ddp.module.weight.item())
            return seen

    first, second = run_world(run, 2, timeout=5)
    assert first == second
    assert first[3] == first[2]
    assert first[4] < first[3]
    assert first[5] < first[4]


ODD = ("frozen since", "past the forwards", "in eval mode", "resumed", "another optimizer")


@pytest.mark.parametrize("waits", [False, True], ids=["", "and waits"])
@pytest.mark.parametrize("how", ODD)
def test_a_step_that_one_rank_skips_under_qadam_holds_nobody_up(how: str, waits: bool, tmp_path: Path) -> None:
    """The third step after the warm-up, and what is odd about it, or about the run: moments from a switch."""

    def make(transport: Transport, algorithm: Algorithm) -> tuple[nn.Module, DDP, QAdamOptimizer]:
        model = fill(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))
        ddp = DDP(model, transport, algorithm=algorithm)
        return model, ddp, QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=1)

    def run(transport: Transport) -> list[torch.Tensor]:
        from_switch = how in ("resumed", "another optimizer")
        model, ddp, optimizer = make(transport, LocalSGDAlgorithm(1) if from_switch else QAdamAlgorithm())
        for index in range(6):
            if from_switch and index == 2:
                if how == "another optimizer":
                    state = optimizer.state_dict()
                    optimizer = QAdamOptimizer(model.parameters(), warmup_steps=1)
                    optimizer.load_state_dict(state)
                ddp.set_algorithm(QAdamAlgorithm(optimizer if how == "another optimizer" else None))
            if how == "resumed" and index == 2:
                Checkpointer(tmp_path).save(1, ddp=ddp, optimizer=optimizer)
                ddp.close()
                model, ddp, optimizer = make(transport, QAdamAlgorithm())
                Checkpointer(tmp_path).load(ddp=ddp, optimizer=optimizer)
            optimizer.zero_grad()
            x = values(6, 4, seed=3 * index + transport.rank)
            model.train(how != "in eval mode")
            is_past = how == "past the forwards" and index == 3
            out = torch.tanh(x @ model[0].weight.T) @ model[2].weight.T if is_past else ddp(x)
            out.square().mean().backward()
            if index != 2 or transport.rank != 1:
                optimizer.step()
            if how == "frozen since" and index == 2:
                model[0].requires_grad_(False)
            if waits and index == 2:
                transport.barrier()
        found = [each.detach().clone() for each in model.parameters()]
        ddp.close()
        return found

    assert all_equal(run_world(run, 2, timeout=5))


def test_the_deadline_tells_of_a_skipped_step() -> None:
    """Something that murmura does not see as a collective stands between the skipped step and the next forward."""

    def run(transport: Transport) -> None:
        ddp = DDP(weight(), transport, algorithm=LocalSGDAlgorithm(1))
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
        ddp(number(1)).sum().backward()
        if transport.rank == 0:
            with pytest.raises(PeerTimeout) as timeout:
                optimizer.step()
            assert timeout.value.peer == 1
            (note,) = timeout.value.__notes__
            assert "Rank 1 has not come to the exchange of weights after round 0. Did it skip" in note
        else:
            with pytest.raises(TransportError):
                transport.recv(torch.zeros(1), 0, timeout=SECONDS)  # point to point: it concerns two ranks, not all

    run_world(run, 2, timeout=1)


def test_the_deadline_names_the_round_whose_exchange_is_missing() -> None:
    """No forward tells of a round: two have ended when rank 0 steps, and the exchange after the first comes first."""

    def run(transport: Transport) -> None:
        ddp = DDP(weight(), transport, algorithm=LocalSGDAlgorithm(1))
        optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
        for _ in range(2):
            ddp.module.weight.sum().backward()
        if transport.rank == 0:
            with pytest.raises(PeerTimeout) as timeout:
                optimizer.step()
            assert "the exchange of weights after round 0." in timeout.value.__notes__[0]
        else:
            with pytest.raises(TransportError):
                transport.recv(torch.zeros(1), 0, timeout=SECONDS)

    run_world(run, 2, timeout=1)


@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_an_average_whose_step_was_skipped_is_written_at_close(mode: str) -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport, algorithm=DecentralizedAlgorithm(peer_selection_mode=mode))
        ddp.module.weight.data.fill_(transport.rank)
        ddp(number(1)).sum().backward()
        ddp.close()
        return ddp.module.weight.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def test_settle_comes_before_a_collective_that_cannot_be_seen() -> None:
    def run(transport: Transport) -> float:
        with closing(DDP(weight(), transport, algorithm=LocalSGDAlgorithm(1))) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=1.0)
            ddp(number(2)).sum().backward()
            if transport.rank == 0:
                optimizer.step()
            ddp.settle()
            if transport.rank == 0:
                transport.send(torch.ones(1), 1)
            else:
                transport.recv(torch.zeros(1), 0)
            return ddp.module.weight.item()

    assert run_world(run, 2, timeout=5) == [0.0, 0.0]
