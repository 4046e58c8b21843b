"""What an algorithm puts on the wire, counted message by message, is what its formula says, for a world of four.

P is the number of parameters and averaged buffers; an element of the model has four bytes.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from contracts.training import perceptron, regression, step
from murmura import (
    DDP,
    AggregateGradients,
    Algorithm,
    AlgorithmImpl,
    ByteGradAlgorithm,
    Cast,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    DistributedConfig,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt4,
    MinMaxUInt8,
    ParameterServer,
    QAdamAlgorithm,
    QAdamOptimizer,
    StreamingDiLoCoAlgorithm,
    TracedTransport,
    Transport,
    run_world,
)
from oracles.algorithms.simulation import chunks
from worlds import SECONDS, ExchangeOnly

SIZE = 4
ROUNDS = 8


def normalised() -> nn.Module:
    """259 parameters and 20 averaged buffers, and a count of batches that has no mean."""
    model = perceptron(torch.float32)
    norm = nn.BatchNorm1d(10, affine=False)
    return nn.Sequential(model[0], model[1], model[2], model[3], model[4], Widen(), norm, Narrow())


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 4)[:, :10]


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :3]


GRADIENTS, BUFFERS = 259, 20
P = GRADIENTS + BUFFERS
TASK = regression("sgd", torch.float32)


def sent_by_round(transport: Transport, make: Callable[[], Algorithm], keep_buffers: bool) -> list[int]:
    """How many bytes this rank sent in each round, from the third on: until then the wrapper settles its order."""
    traced = TracedTransport(transport)
    ddp = DDP(normalised(), ExchangeOnly(traced), algorithm=make(), broadcast_buffers=keep_buffers)
    is_qadam = isinstance(ddp.algorithm, QAdamAlgorithm.impl)
    optimizer = QAdamOptimizer(ddp.parameters(), warmup_steps=2) if is_qadam else TASK.make_optimizer(ddp.parameters())
    sums = [0]
    for number in range(ROUNDS):
        step(ddp, optimizer, TASK, number, transport.rank)
        transport.barrier()
        sums.append(sum(each.sent_bytes for each in traced.operations))
    ddp.close()
    return [after - before for before, after in itertools.pairwise(sums)][2:]


def sent(make: Callable[[], Algorithm], *, keep_buffers: bool = True) -> list[list[int]]:
    """By rank and round."""
    return run_world(sent_by_round, SIZE, make, keep_buffers, timeout=SECONDS)


def test_shift_one_sends_the_weights_once() -> None:
    assert sent(lambda: DecentralizedAlgorithm(True, "shift_one", 1)) == [[4 * P] * 6] * SIZE
    assert sent(lambda: DecentralizedAlgorithm(True, "shift_one", 3)) == [[0, 4 * P, 0, 0, 4 * P, 0]] * SIZE


def test_low_precision_sends_eight_bits_to_each_neighbour() -> None:
    payload = MinMaxUInt8().payload_bytes(P, torch.float32)
    assert P < payload < P + 64
    assert sent(lambda: LowPrecisionDecentralizedAlgorithm(True, 1)) == [[2 * payload + VOTE] * 6] * SIZE
    assert sent(lambda: LowPrecisionDecentralizedAlgorithm(True, 2)) == [[2 * payload + VOTE, 0] * 3] * SIZE


def small_all_reduce(num_elements: int, element_bytes: int = 4) -> int:
    """Bytes that a rank sends for a buffer which is reduced in one exchange: it goes to everybody."""
    return (SIZE - 1) * element_bytes * num_elements


TAIL = small_all_reduce(6 + 2, element_bytes=8)  # once a round, for six parameters
VOTE = small_all_reduce(1)  # before an exchange that follows the optimizer's step


def compressed_exchange(num_elements: int) -> list[int]:
    """By rank: the chunks of the others there, and one's own chunk of the mean to everybody."""
    q = MinMaxUInt8()
    sizes = [q.payload_bytes(chunk.stop - chunk.start, torch.float32) for chunk in chunks(num_elements, SIZE)]
    return [sum(sizes) - sizes[rank] + (SIZE - 1) * sizes[rank] for rank in range(SIZE)]


def test_averages_of_weights_are_one_all_reduce() -> None:
    assert sent(lambda: DecentralizedAlgorithm(True, "all", 2)) == [[small_all_reduce(P), 0] * 3] * SIZE
    assert sent(lambda: LocalSGDAlgorithm(2)) == [[0, small_all_reduce(P) + VOTE] * 3] * SIZE
    assert sent(lambda: DiLoCoAlgorithm(2)) == [[0, small_all_reduce(P) + VOTE] * 3] * SIZE


def test_gradients_are_one_all_reduce_and_their_tail_another() -> None:
    assert sent(GradientAllReduceAlgorithm, keep_buffers=False) == [[small_all_reduce(GRADIENTS) + TAIL] * 6] * SIZE


def test_bytegrad_sends_eight_bits_twice_and_the_tail() -> None:
    wanted = compressed_exchange(GRADIENTS)
    assert sent(ByteGradAlgorithm, keep_buffers=False) == [[each + TAIL] * 6 for each in wanted]
    headers = sum(wanted) / SIZE - 2 * (SIZE - 1) / SIZE * GRADIENTS
    assert 0 < headers <= 2 * (SIZE - 1) * 8  # a minimum and a maximum with each of six messages


def test_a_compressed_outer_step_sends_eight_bits_twice_and_the_buffers_whole() -> None:
    wanted = [[0, each + small_all_reduce(BUFFERS) + VOTE] * 3 for each in compressed_exchange(GRADIENTS)]
    assert sent(lambda: DiLoCoAlgorithm(2, compressor=MinMaxUInt8())) == wanted


def test_a_cast_sends_two_bytes_twice_and_the_tail() -> None:
    sizes = [2 * (chunk.stop - chunk.start) for chunk in chunks(GRADIENTS, SIZE)]
    wanted = [sum(sizes) + (SIZE - 2) * own + TAIL for own in sizes]
    make = functools.partial(GradientAllReduceAlgorithm, compressor=Cast(torch.bfloat16))
    assert sent(make, keep_buffers=False) == [[each] * 6 for each in wanted]


def test_qadam_sends_eight_bits_twice_after_its_warm_up_and_flags() -> None:
    wanted = [each + small_all_reduce(6 + 2) for each in compressed_exchange(GRADIENTS)]
    assert sent(QAdamAlgorithm, keep_buffers=False) == [[each] * 6 for each in wanted]


class Server(Algorithm):
    def reify(self, process_group: Transport) -> AlgorithmImpl:
        config = DistributedConfig(world_size=SIZE, rank=process_group.rank)
        return AggregateGradients(ParameterServer(config, process_group)).reify(process_group)


def test_a_parameter_server_gets_every_gradient_and_sends_the_mean_down_a_tree() -> None:
    whole, agreement = 4 * GRADIENTS, (SIZE - 1) * 16
    num_children = [2, 1, 0, 0]
    wanted = [agreement + TAIL + (rank > 0) * whole + num_children[rank] * whole for rank in range(SIZE)]
    assert sent(Server, keep_buffers=False) == [[each] * 6 for each in wanted]


# What is in flight


@dataclass
class Flight:
    """The bytes that have been handed to a transport and whose exchange is under way, and the most there were."""

    now: int = 0
    most: int = 0
    may_land: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, num_bytes: int) -> None:
        with self.lock:
            self.now += num_bytes
            self.most = max(self.most, self.now)

    def end(self, num_bytes: int) -> None:
        with self.lock:
            self.now -= num_bytes


class Counting(ExchangeOnly):
    """Counts what is in flight on the channels that are split from it, where an exchange lasts until it may land."""

    def __init__(self, inner: Transport, flight: Flight, *, is_split: bool = False) -> None:
        super().__init__(inner)
        self.flight, self.is_split = flight, is_split

    def do_exchange(self, sends: Any, recvs: Any, timeout: float | None) -> None:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor, _ in sends) if self.is_split else 0
        self.flight.begin(num_bytes)
        assert not self.is_split or self.flight.may_land.wait(SECONDS)
        super().do_exchange(sends, recvs, timeout)
        self.flight.end(num_bytes)

    def split(self, name: str, ranks: Any = None) -> ExchangeOnly | None:
        inner = self._inner.split(name, ranks)
        if inner is None:
            return None
        split = Counting(inner, self.flight, is_split=name.endswith("fragments"))
        self.keep_split(split, ranks)
        return split


def most_in_flight(transport: Transport, algorithm: StreamingDiLoCoAlgorithm) -> int:
    """The most bytes of this rank's that were ever under way; nothing lands before the round after which it must."""
    flight = Flight()
    ddp = DDP(TASK.make_model(), Counting(transport, flight), algorithm=algorithm)
    optimizer = TASK.make_optimizer(ddp.parameters())
    for number in range(2 * algorithm.interval):
        is_awaited = (number + 1) % (algorithm.interval // algorithm.fragments) == 0
        flight.may_land.set() if is_awaited else flight.may_land.clear()
        step(ddp, optimizer, TASK, number, transport.rank)
    flight.may_land.set()
    ddp.close()
    assert flight.now == 0
    return flight.most


def test_at_most_one_fragment_is_counted_in_flight() -> None:
    fragment, whole = (MinMaxUInt4().payload_bytes(numel, torch.float32) for numel in (65, 259))
    algorithm = StreamingDiLoCoAlgorithm(8, fragments=4, overlap=1)
    for most in run_world(most_in_flight, 2, algorithm, timeout=SECONDS):
        assert 0 < most <= fragment < whole / 3
