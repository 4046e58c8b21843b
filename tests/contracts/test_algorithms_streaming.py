"""Streaming DiLoCo: its rule, what is in flight, and what may happen while something is."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts.grids import SIZES, grid
from contracts.test_algorithms_state import check_resumption, run
from contracts.training import (
    Run,
    Task,
    assert_close,
    by_step,
    perceptron,
    regression,
    spread,
    step,
    train,
    train_world,
)
from ddp.models import fill
from murmura import (
    DDP,
    ConfigError,
    DiLoCoAlgorithm,
    ErrorFeedback,
    MinMaxUInt4,
    MinMaxUInt8,
    MurmuraError,
    StreamingDiLoCoAlgorithm,
    TracedTransport,
    Transport,
    run_world,
)
from murmura.algorithms import algorithm_named
from murmura.algorithms.background_exchange import BackgroundExchanges
from oracles.algorithms.simulation import Feedback, chunks, flat_of, simulate, there_and_back
from oracles.algorithms.streaming_diloco import StreamingDiLoCo
from worlds import SECONDS, ExchangeOnly

STEPS = 9
SHAPES = ((4, 4, 1, 0.5), (4, 2, 2, 0.5), (5, 2, 1, 0.25), (3, 1, 3, 0.0), (3, 3, 0, 0.5), (2, 1, 0, 0.0), (5, 3, 1, 0))
"""Intervals, fragments, overlaps and alphas."""


def streaming(interval: int, fragments: int, overlap: int, alpha: float, **choices: Any) -> StreamingDiLoCoAlgorithm:
    return StreamingDiLoCoAlgorithm(interval, fragments=fragments, overlap=overlap, alpha=alpha, **choices)


def save_and_load(transport: Transport, saved: Any, here: Any) -> str:
    """The refusal of a state of one choice by another one, or nothing."""
    with closing(DDP(torch.nn.Linear(9, 9), transport, algorithm=saved)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(4):
            ddp(torch.full((1, 9), transport.rank + 1.0)).sum().backward()
            optimizer.step()
        state = ddp.algorithm_state_dict()
    with closing(DDP(torch.nn.Linear(9, 9), transport, algorithm=here)) as ddp:
        try:
            ddp.load_algorithm_state_dict(state)
        except ConfigError as error:
            return str(error)
    return ""


def test_what_compression_left_over_of_other_fragments_is_refused() -> None:
    two, four = (StreamingDiLoCoAlgorithm(4, fragments=each, overlap=1) for each in (2, 4))
    for text in run_world(partial(save_and_load, saved=two, here=four), 2, timeout=SECONDS):
        assert "of 2 parts, and here are 4" in text
    lossless = replace(two, compressor=None)
    assert run_world(partial(save_and_load, saved=two, here=two), 2, timeout=SECONDS) == [""] * 2
    assert run_world(partial(save_and_load, saved=lossless, here=lossless), 2, timeout=SECONDS) == [""] * 2
    whole = DiLoCoAlgorithm(4)
    (text,) = run_world(partial(save_and_load, saved=whole, here=lossless), 1)
    assert text.startswith("this state was saved by DiLoCoAlgorithmImpl, and StreamingDiLoCoAlgorithmImpl is running")


def uint4() -> Feedback:
    return Feedback(there_and_back(MinMaxUInt4()))


# The rule


@grid("size, shape, optimizer", SIZES, SHAPES, ("sgd", "adam"), sample=7)
def test_as_simulated(size: int, shape: tuple[int, int, int, float], optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, streaming(*shape, compressor=None), task, STEPS))
    assert_close(flats, simulate(StreamingDiLoCo(*shape), task, size, STEPS))
    assert size == 1 or spread(flats[0]) > 0


@grid("size, shape", SIZES, SHAPES, sample=7)
def test_in_four_bits_to_the_bit(size: int, shape: tuple[int, int, int, float]) -> None:
    task = regression("momentum")
    flats = by_step(train_world(size, streaming(*shape), task, STEPS))
    assert_close(flats, simulate(StreamingDiLoCo(*shape, q=uint4), task, size, STEPS), within=0.0)


def train_both(transport: Transport, task: Task) -> list[Run]:
    """As they are, and in four bits; one world for both, since worlds take long to start."""
    return [train(transport, streaming(4, 2, 2, 0.5, compressor=each), task, STEPS) for each in (None, "uint4")]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "hierarchical"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_between_processes(transport: str, size: int) -> None:
    task, hosts = regression("momentum"), [rank % 2 for rank in range(size)]
    by_rank = run_world(train_both, size, task, kind="processes", transport=transport, hosts=hosts, timeout=SECONDS)
    for q, runs in zip((None, uint4), zip(*by_rank, strict=True), strict=True):
        assert_close(by_step(runs), simulate(StreamingDiLoCo(4, 2, 2, 0.5, q=q), task, size, STEPS))


@pytest.mark.parametrize("compressor", [None, MinMaxUInt8(16)], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_one_fragment_without_overlap_is_diloco_to_the_bit(size: int, compressor: Any) -> None:
    task = regression("adam", torch.float32)
    plain = by_step(train_world(size, DiLoCoAlgorithm(2, 0.5, 0.8, compressor=compressor), task, STEPS))
    algorithm = streaming(2, 1, 0, 0.0, outer_lr=0.5, outer_momentum=0.8, compressor=compressor)
    assert_close(by_step(train_world(size, algorithm, task, STEPS)), plain, within=0.0)


def one_tensor() -> nn.Module:
    """Parameters that do not lie in memory in the order of their elements, and that fragments cut in two."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    fill(model)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def test_parameters_that_are_not_contiguous() -> None:
    task = replace(regression("momentum"), make_model=one_tensor)
    assert not one_tensor()[0].weight.is_contiguous()
    flats = by_step(train_world(2, streaming(4, 4, 1, 0.5, compressor=None), task, STEPS))
    assert_close(flats, simulate(StreamingDiLoCo(4, 4, 1, 0.5), task, 2, STEPS))


def tiny() -> nn.Module:
    return fill(nn.Linear(5, 3)).double()


def test_more_fragments_than_elements() -> None:
    task = replace(regression("sgd"), make_model=tiny)
    shape = (20, 20, 1, 0.5)  # 18 elements
    flats = by_step(train_world(2, streaming(*shape, compressor=None), task, 25))
    assert_close(flats, simulate(StreamingDiLoCo(*shape), task, 2, 25))


# What is in flight


class Watched(BackgroundExchanges):
    """Remembers, for each exchange, its bytes and whether the one before had ended and been waited for."""

    def __init__(self, channel: Transport) -> None:
        super().__init__(channel)
        self.waited = True
        self.alone: list[bool] = []

    def start(self, what: str, tensors: Any, work: Callable[[], None], operation: str = "exchange") -> Any:
        self.alone.append(self.waited)
        self.waited = False
        pending = super().start(what, tensors, work, operation)
        wait = pending.wait

        def waited() -> None:
            wait()
            self.waited = True

        pending.wait = waited  # type: ignore[method-assign]
        return pending


def test_one_fragment_is_in_flight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.algorithms.diloco.BackgroundExchanges", Watched)
    for watched in train_world(
        2, streaming(6, 3, 2, 0.5), regression(), 13, observe=lambda ddp: list(ddp.algorithm._background.alone)
    ):
        assert watched.observed[-1] == [True] * 6


def sent_by_round(transport: Transport, algorithm: StreamingDiLoCoAlgorithm, rounds: int) -> list[int]:
    """The bytes of the exchange that began after each round: saving the state waits for it."""
    traced = TracedTransport(transport)
    task = regression("sgd", torch.float32)
    ddp = DDP(task.make_model(), ExchangeOnly(traced), algorithm=algorithm)
    optimizer = task.make_optimizer(ddp.parameters())
    sums = [sum(each.sent_bytes for each in traced.operations)]
    for number in range(rounds):
        step(ddp, optimizer, task, number, transport.rank)
        ddp.algorithm_state_dict()
        sums.append(sum(each.sent_bytes for each in traced.operations))
    ddp.close()
    return [after - before for before, after in itertools.pairwise(sums)]


def test_the_bytes_are_those_of_one_fragment_at_a_time() -> None:
    """259 parameters in four fragments. Of two ranks each sends one chunk of the changes, and one of their mean.

    Before comes a vote of four bytes, for one of them may have skipped its step.
    """
    algorithm = streaming(8, 4, 2, 0.5)
    sizes = [
        4 + sum(MinMaxUInt4().payload_bytes(chunk.stop - chunk.start, torch.float32) for chunk in chunks(numel, 2))
        for numel in (65, 65, 65, 64)
    ]
    wanted = [0, sizes[1], 0, sizes[2], 0, sizes[3], 0, sizes[0]]
    assert run_world(sent_by_round, 2, algorithm, 16, timeout=SECONDS) == [wanted * 2] * 2
    large = 4 * 100_000
    assert algorithm.bytes_per_round(large, 2) == 4 * MinMaxUInt4().payload_bytes(large // 4, torch.float32) / 8
    assert replace(algorithm, compressor=None).bytes_per_round(large, 4) == 1.5 * 4 * large / 8


def test_nobody_waits_before_the_overlap_is_over() -> None:
    """Rank 1 begins round 4, after which an exchange begins, when rank 0 has come to the end of round 6."""
    far_enough = threading.Event()

    def visit(transport: Transport) -> Tensor:
        task = regression()
        ddp = DDP(task.make_model(), transport, algorithm=streaming(4, 1, 3, 0.5))
        optimizer = task.make_optimizer(ddp.parameters())
        for number in range(9):
            step(ddp, optimizer, task, number, transport.rank)
            if number == 6 and transport.rank == 0:  # an exchange began after round 4, and ends after round 7
                far_enough.set()
            elif number == 3 and transport.rank == 1:
                assert far_enough.wait(SECONDS)
        ddp.close()
        return flat_of(ddp.module)

    flats = run_world(visit, 2, timeout=SECONDS)
    assert_close([flats], simulate(StreamingDiLoCo(4, 1, 3, 0.5, q=uint4), regression(), 2, 9)[-1:])


def test_looking_at_the_replicas_changes_nothing() -> None:
    def look(ddp: DDP) -> tuple[float, Tensor]:
        with ddp.average_parameters():
            return ddp.consensus_distance(), flat_of(ddp.module)

    algorithm, task = streaming(4, 2, 2, 0.5), regression("momentum")
    runs = train_world(3, algorithm, task, STEPS, observe=look)
    assert_close(by_step(runs), by_step(train_world(3, algorithm, task, STEPS)), within=0.0)
    for number, flats in enumerate(by_step(runs)):
        for each in runs:
            distance, mean = each.observed[number]
            assert distance == 0  # inside the block
            assert torch.allclose(mean, sum(flats) / 3, atol=1e-12, rtol=0)  # type: ignore[arg-type]


# What may happen meanwhile


@pytest.mark.parametrize("compressor", [None, "uint4"])
def test_a_run_resumed_with_a_fragment_in_flight(compressor: str | None) -> None:
    """Exchanges begin after rounds 1 and 3, and end two rounds later: three of four cuts are in between."""
    check_resumption(3, streaming(4, 2, 2, 0.5, compressor=compressor), regression("adam", torch.float32))


def test_saving_changes_nothing() -> None:
    algorithm, task = streaming(4, 2, 2, 0.5), regression("momentum", torch.float32)
    saving = run_world(run, 3, algorithm, task, range(STEPS), timeout=SECONDS)
    plain = by_step(train_world(3, algorithm, task, STEPS))
    assert_close([list(each) for each in zip(*(flats for flats, _ in saving), strict=True)], plain, within=0.0)


def frozen_first() -> nn.Module:
    model = perceptron()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("compressor", [None, "uint4"])
def test_parameters_thawed_while_a_fragment_is_in_flight(compressor: str | None) -> None:
    """It covers what it did when it was sent, and arrives in its time; with alpha = 0 replicas are then equal there."""

    def visit(transport: Transport) -> tuple[list[Tensor], dict[str, Tensor]]:
        task = regression()
        ddp = DDP(frozen_first(), transport, algorithm=streaming(4, 2, 2, 0.0, compressor=compressor))
        optimizer = task.make_optimizer(ddp.parameters())
        flats = []
        for number in range(10):
            if number == 2:  # the second of two fragments was sent after round 1
                ddp.module[0].requires_grad_(True)
            step(ddp, optimizer, task, number, transport.rank)
            flats.append(flat_of(ddp.module))
        theta = ddp.algorithm_state_dict()["algorithm"]["theta"]
        ddp.close()
        return flats, theta

    (flats, theta), (others, other_theta) = run_world(visit, 2, timeout=SECONDS)
    frozen, trained = 96, 163
    sent = slice(frozen + (trained + 1) // 2, None)
    assert not torch.equal(flats[2][sent], others[2][sent])
    assert torch.equal(flats[3][sent], others[3][sent])
    assert not torch.equal(flats[3][:frozen], others[3][:frozen])  # they are trained, and have not been exchanged
    whole = torch.cat([each.view(-1) for each in theta.values()])
    assert whole.numel() == frozen + trained
    assert torch.equal(whole, torch.cat([each.view(-1) for each in other_theta.values()]))
    sent_anew = slice(0, (frozen + trained + 1) // 2)  # after round 7, and taken over after round 9
    assert torch.equal(flats[9][sent_anew], others[9][sent_anew])


def save_in_flight(transport: Transport, algorithm: StreamingDiLoCoAlgorithm) -> tuple[Any, Any]:
    """The weights and the state after round 1, when a fragment has been sent."""
    task = regression()
    ddp = DDP(task.make_model(), transport, algorithm=algorithm)
    optimizer = task.make_optimizer(ddp.parameters())
    for number in range(2):
        step(ddp, optimizer, task, number, transport.rank)
    weights, state = {name: each.clone() for name, each in ddp.state_dict().items()}, ddp.algorithm_state_dict()
    ddp.close()
    return weights, state


def with_pieces(state: Any, change: Callable[[str, int, int], tuple[str, int, int]]) -> Any:
    """`state`, whose fragment in flight has other pieces."""
    arrival = state["algorithm"]["arrival"]
    parts = [([change(*piece) for piece in pieces], stage) for pieces, stage in arrival["parts"]]
    return {**state, "algorithm": {**state["algorithm"], "arrival": {**arrival, "parts": parts}}}


def renamed(state: Any) -> Any:
    return with_pieces(state, lambda name, start, stop: ("other", start, stop))


def lengthened(state: Any) -> Any:
    return with_pieces(state, lambda name, start, stop: (name, start, stop + 1000))


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "change", "model", "reason"),
    [
        (streaming(4, 1, 2, 0.5, compressor=None), None, renamed, perceptron, "elements of 'other', which the model"),
        (streaming(4, 1, 2, 0.5, compressor=None), None, lengthened, perceptron, "of '0.weight', which the model"),
        (streaming(4, 2, 2, 0.5), streaming(4, 1, 2, 0.5), None, perceptron, "of 2 parts, and here are 1"),
        (streaming(4, 2, 2, 0.5), streaming(4, 1, 2, 0.5), None, frozen_first, "of 2 parts, and here are 1"),
    ],
    ids=["name", "length", "fragments", "fragments with a frozen layer"],
)
def test_a_state_that_does_not_fit_is_refused_when_it_is_loaded(
    saved_by: StreamingDiLoCoAlgorithm, loaded_by: Any, change: Any, model: Any, reason: str
) -> None:
    def visit(transport: Transport) -> str:
        weights, state = save_in_flight(transport, saved_by)
        with closing(DDP(model(), transport, algorithm=loaded_by or saved_by)) as ddp:
            ddp.load_state_dict(weights)
            with pytest.raises(ConfigError) as refusal:
                ddp.load_algorithm_state_dict(change(state) if change else state)
            return str(refusal.value)

    for told in run_world(visit, 2, timeout=SECONDS):
        assert reason in told


def test_weights_loaded_while_a_fragment_is_in_flight() -> None:
    """What is in flight is void: the run goes on as one that begins with these weights."""
    task, algorithm = regression(), streaming(4, 2, 2, 0.5, compressor=None)

    def visit(transport: Transport) -> list[Tensor]:
        ddp = DDP(task.make_model(), transport, algorithm=algorithm)
        optimizer = task.make_optimizer(ddp.parameters())
        for number in range(4):  # a fragment was sent after round 3
            step(ddp, optimizer, task, number, transport.rank)
        ddp.load_state_dict(task.make_model().state_dict())
        flats = []
        for number in range(STEPS):
            step(ddp, optimizer, task, number, transport.rank)
            flats.append(flat_of(ddp.module))
        ddp.close()
        return flats

    by_rank = run_world(visit, 3, timeout=SECONDS)
    wanted = by_step(train_world(3, algorithm, task, STEPS))
    assert_close([list(each) for each in zip(*by_rank, strict=True)], wanted)


def test_an_exchange_that_fails_names_its_fragment() -> None:
    def visit(transport: Transport) -> str:
        task = regression()
        ddp = DDP(task.make_model(), transport, algorithm=streaming(4, 2, 2, 0.5))
        optimizer = task.make_optimizer(ddp.parameters())
        for number in range(3):
            step(ddp, optimizer, task, number, transport.rank)
            if number == 0 and transport.rank == 1:
                transport.close()
                return ""
        step(ddp, optimizer, task, 3, transport.rank)
        return "no error"

    def told(transport: Transport) -> list[str]:
        try:
            return [visit(transport)]
        except MurmuraError as error:
            return [str(error), *error.__notes__]

    (message, *notes), _ = run_world(told, 2, timeout=SECONDS)
    assert "rank 1" in message
    assert "This ended the exchange of fragment 1 of 2 (from 0), which began on rank 0 after round 1." in notes


# Choices


def test_options_of_the_name() -> None:
    name = "streaming_diloco:interval=20:fragments=4:overlap=5:alpha=0.5:compressor=uint4"
    made = algorithm_named(name)
    assert made == StreamingDiLoCoAlgorithm(20, overlap=5, compressor=ErrorFeedback(MinMaxUInt4()))
    assert algorithm_named("streaming_diloco") == StreamingDiLoCoAlgorithm(20, fragments=4, overlap=4, alpha=0.5)
    assert (made.period, made.hides_exchange, made.keeps_replicas_equal) == (20, True, False)
    plain = streaming(20, 1, 0, 0.0, compressor=None)
    assert (plain.hides_exchange, plain.keeps_replicas_equal) == (False, True)
    assert [StreamingDiLoCoAlgorithm(each).overlap for each in (4, 8, 12, 100)] == [1, 1, 2, 5]


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"interval": 3}, "fragments=4 cannot each have a round of their own in interval=3. Give at most 3"),
        ({"interval": 20, "overlap": 6}, "overlap=6 must be a whole number from 0 to 5 "),
        ({"interval": 7, "fragments": 2, "overlap": 4}, "overlap=4 must be a whole number from 0 to 3 "),
    ],
)
def test_two_fragments_in_flight_are_refused(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        StreamingDiLoCoAlgorithm(**choices)
    assert reason in str(refusal.value)


@pytest.mark.timed
def test_a_peer_that_does_not_come_when_the_model_is_closed_is_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    has_closed = threading.Event()

    def visit(transport: Transport) -> None:
        task = regression()
        ddp = DDP(task.make_model(), transport, algorithm=streaming(4, 1, 3, 0.5))
        if transport.rank == 0:  # whose exchange begins after this round
            step(ddp, task.make_optimizer(ddp.parameters()), task, 0, transport.rank)
        else:
            assert has_closed.wait(SECONDS)
        ddp.close()
        has_closed.set()

    run_world(visit, 2, timeout=0.5)
    assert "the exchange under way had failed at the end: rank 0 waited" in caplog.text
