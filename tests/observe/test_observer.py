"""Records of steps of a real DDP: what is exposed and hidden, bytes, norms, and that training is not touched."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from murmura import (
    DDP,
    ConfigError,
    InProcessTransport,
    ThrottledTransport,
    TracedTransport,
    Transport,
    UsageError,
    run_world,
)
from murmura.algorithms import Algorithm, AlgorithmImpl
from murmura.buckets import Bucket
from murmura.observe import Observer, Record
from observe.clocks import HandClock, batch, small_model
from worlds import SECONDS

TINY_BUCKETS = 1  # bytes: every parameter has its own


@dataclass(frozen=True)
class Scripted(Algorithm):
    """Exchanges nothing, in a world of one, and calls what a test wants called."""

    on_bucket: Callable[[Bucket], object] = lambda bucket: None
    on_step: Callable[[], object] = lambda: None

    def reify(self, process_group: Transport) -> AlgorithmImpl:
        return ScriptedImpl(process_group, self)


class ScriptedImpl(AlgorithmImpl):
    def __init__(self, process_group: Transport, script: Scripted) -> None:
        super().__init__(process_group)
        self.script = script

    def on_bucket_ready(self, bucket: Bucket) -> None:
        self.script.on_bucket(bucket)

    def after_step(self, optimizer: Any) -> None:
        self.script.on_step()


class Watched(nn.Module):
    """The identity; `on_forward` and `on_backward` are called in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.on_forward: Callable[[], object] = lambda: None
        self.on_backward: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward()
        out = x.clone()
        out.register_hook(lambda gradient: self.on_backward() and None)
        return out


@dataclass
class Scene:
    """One rank on a clock of its own."""

    script: Scripted
    clock: HandClock
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first, last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.middle = Watched()
        self.model = nn.Sequential(first, self.middle, last)

    def run(
        self, steps: int, *, by_hand: bool = False, between: Callable[[Observer], object] = lambda _: None
    ) -> list[Record]:
        records: list[Record] = []
        (transport,) = InProcessTransport.create_group(1)
        with transport:
            ddp = DDP(self.model, transport, algorithm=self.script, bucket_size_bytes=TINY_BUCKETS)
            optimizer = SGD(ddp.parameters(), lr=0.0)
            with Observer(ddp, [records.append], clock=self.clock, **self.options) as observer:
                for _ in range(steps):
                    if by_hand:
                        with ddp.no_sync():
                            ddp(batch(0)).sum().backward()
                        ddp.sync_gradients()
                    else:
                        ddp(batch(0)).sum().backward()
                    optimizer.step()
                    between(observer)
            ddp.close()
        return records


def test_an_exchange_during_backward_is_hidden() -> None:
    clock, home = HandClock(), threading.Event()

    def exchange(bucket: Bucket) -> None:
        if bucket.index == 0:
            clock.pass_ms(5)
            home.set()

    scene = Scene(Scripted(exchange), clock)
    scene.middle.on_forward = lambda: clock.pass_ms(10)
    came: list[bool] = []
    scene.middle.on_backward = lambda: came.append(home.wait(SECONDS))
    (record,) = scene.run(1)
    assert came == [True]
    assert (record.wall_ms, record.compute_ms, record.waited_ms) == (15, 15, 0)
    assert (record.exchange_ms, record.hidden_ms) == (5, 5)


def test_an_exchange_after_backward_is_exposed() -> None:
    clock = HandClock()
    scene = Scene(Scripted(lambda bucket: clock.pass_ms(2)), clock)  # four buckets
    scene.middle.on_forward = lambda: clock.pass_ms(10)
    (record,) = scene.run(1, by_hand=True)
    assert (record.wall_ms, record.compute_ms, record.waited_ms) == (18, 10, 8)
    assert (record.exchange_ms, record.hidden_ms) == (8, 0)


def test_what_an_algorithm_does_around_the_step_is_exposed_and_belongs_to_it() -> None:
    clock = HandClock()
    scene = Scene(Scripted(on_step=lambda: clock.pass_ms(3)), clock)
    records = scene.run(2)
    assert [(each.step, each.wall_ms, each.waited_ms) for each in records] == [(0, 3, 3), (1, 3, 3)]


def test_steps_follow_each_other_without_a_gap() -> None:
    """What runs between two steps, such as loading a batch, belongs to the later one; after the last, to none."""
    clock = HandClock()
    scene = Scene(Scripted(), clock)
    scene.middle.on_forward = lambda: clock.pass_ms(1)
    records = scene.run(3, between=lambda observer: clock.pass_ms(4))
    assert [each.wall_ms for each in records] == [1, 5, 5]
    assert records[1].time - records[0].time == pytest.approx(0.005, abs=1e-6)


def test_numbers_logged_after_the_step_are_in_its_record() -> None:
    losses = iter([0.5, math.nan])
    scene = Scene(Scripted(), HandClock())
    records = scene.run(2, between=lambda observer: observer.log(loss=torch.tensor(next(losses), requires_grad=True)))
    assert records[0].logged == {"loss": 0.5}
    assert math.isnan(Record.from_json(records[1].to_json()).logged["loss"])


def test_the_newest_record_is_at_hand() -> None:
    seen: list[int | None] = []
    scene = Scene(Scripted(), HandClock())
    scene.run(3, between=lambda observer: seen.append(observer.latest.step if observer.latest else None))
    assert seen == [None, 0, 1]


# Several ranks


def train(transport: Transport, algorithm: str, observed: bool, options: dict[str, Any]) -> Any:
    traced = TracedTransport(transport)
    records: list[Record] = []
    ddp = DDP(small_model(), traced, algorithm=algorithm, bucket_size_bytes=64)
    optimizer = SGD(ddp.parameters(), lr=0.125)
    num_before = len(traced.operations)

    def steps() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            ddp(batch(transport.rank)).square().mean().backward()
            optimizer.step()

    if observed:
        with Observer(ddp, [records.append], **options):
            steps()
    else:
        steps()
    ddp.algorithm.settle()
    operations = traced.operations[num_before:]
    ddp.close()
    return records, operations, [parameter.detach().clone() for parameter in ddp.parameters()]


ALGORITHMS = ["gradient_allreduce", "decentralized", "low_precision_decentralized", "bytegrad"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_operation_is_counted_once_with_its_bytes(algorithm: str) -> None:
    for records, operations, _ in run_world(train, 3, algorithm, True, {}, timeout=SECONDS):
        expected: dict[str, int] = {}
        for operation in operations:
            if operation.sent_bytes:
                expected[operation.name] = expected.get(operation.name, 0) + operation.sent_bytes
        assert expected
        counted: dict[str, int] = {}
        for record in records:
            for name, num_bytes in record.bytes.items():
                counted[name] = counted.get(name, 0) + num_bytes
        assert counted == expected


def bytes_on_a_ring(transport: Transport) -> list[dict[str, int]]:
    ddp = DDP(small_model(), ThrottledTransport(transport, "1000gbit"))
    records: list[Record] = []
    ddp(batch(transport.rank)).sum().backward()  # after it the ranks agree once on the order of gradients
    with Observer(ddp, [records.append]):
        ddp(batch(transport.rank)).sum().backward()
    num_bytes = sum(bucket.flat.nbytes for bucket in ddp._replica.buckets)
    num_bytes += 8 * (len(ddp._replica.parameters) + 2)  # the tail of the round
    ddp.close()
    return [each.bytes for each in records] + [{"all_reduce": num_bytes}]


def test_the_exchanges_a_collective_consists_of_are_not_counted_again() -> None:
    for counted, expected in run_world(bytes_on_a_ring, 3, timeout=SECONDS):
        assert counted == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_observing_changes_no_bit_of_what_is_trained(algorithm: str) -> None:
    options = {"consensus_every": 2, "gradient_norm": True}
    watched = run_world(train, 2, algorithm, True, options, timeout=SECONDS)
    unwatched = run_world(train, 2, algorithm, False, {}, timeout=SECONDS)
    for (_, _, first), (_, _, second) in zip(watched, unwatched, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_times_add_up(algorithm: str) -> None:
    for rank, (records, _, _) in enumerate(run_world(train, 2, algorithm, True, {}, timeout=SECONDS)):
        assert [(each.step, each.rank) for each in records] == [(step, rank) for step in range(4)]
        for record in records:
            assert record.wall_ms == pytest.approx(record.compute_ms + record.waited_ms)
            assert 0 <= record.hidden_ms <= record.exchange_ms <= record.hidden_ms + record.waited_ms + 1e-6
            assert record.exchange_ms > 0
            assert record.waiting is not None
            assert set(record.waiting) <= {1 - rank}


def distances(transport: Transport) -> tuple[list[Record], float]:
    ddp = DDP(small_model(), transport, algorithm="decentralized")
    optimizer = SGD(ddp.parameters(), lr=0.125)
    records: list[Record] = []
    with Observer(ddp, [records.append], consensus_every=2, gradient_norm=True):
        for _ in range(4):
            optimizer.zero_grad()
            ddp(batch(transport.rank)).square().mean().backward()
            optimizer.step()
        norm = math.sqrt(sum(float(each.grad.square().sum()) for each in ddp.parameters() if each.grad is not None))
    last = ddp.consensus_distance()
    ddp.close()
    assert records[-1].gradient_norm == pytest.approx(norm)
    return records, last


def test_consensus_and_gradient_norm_are_measured_when_asked_for() -> None:
    for records, last in run_world(distances, 2, timeout=SECONDS):
        measured = [each.consensus_distance for each in records]
        assert measured[0] is measured[2] is measured[3] is None  # the last step ends with the block
        assert measured[1] is not None
        assert measured[1] > 0
        assert last > 0
        assert all(each.gradient_norm is not None for each in records)
        assert all(set(each.bytes) == {"all_reduce"} for each in records)
        assert records[1].bytes == records[2].bytes  # measuring is in no record


def switch(transport: Transport) -> list[dict[str, int]]:
    ddp = DDP(small_model(), transport)
    optimizer = SGD(ddp.parameters(), lr=0.125)
    records: list[Record] = []
    with Observer(ddp, [records.append]):
        for step in range(2):
            if step == 1:
                ddp.set_algorithm("low_precision_decentralized")
            ddp(batch(transport.rank)).square().mean().backward()
            optimizer.step()
    ddp.close()
    return [each.bytes for each in records]


def test_channels_that_are_made_later_are_observed_too() -> None:
    for first, second in run_world(switch, 2, timeout=SECONDS):
        assert "exchange" not in first
        assert second["exchange"] > 0


def on_gloo(transport: Transport) -> list[Record]:
    return train(transport, "gradient_allreduce", True, {})[0]  # type: ignore[no-any-return]


def test_a_process_group_leaves_out_whom_it_waited_for() -> None:
    for records in run_world(on_gloo, 2, kind="processes", transport="gloo", timeout=SECONDS):
        assert all(each.waiting is None for each in records)
        assert all(each.exchange_ms > 0 for each in records)


# Life


def test_after_the_block_nothing_is_recorded() -> None:
    records: list[Record] = []
    (transport,) = InProcessTransport.create_group(1)
    with transport:
        ddp = DDP(small_model(), transport)
        with Observer(ddp, [records.append]) as observer:
            ddp(batch(0)).sum().backward()
        ddp(batch(0)).sum().backward()
        observer.close()
        assert len(records) == 1
        with pytest.raises(UsageError, match="it observes once"):
            observer.__enter__()
        with Observer(ddp, [records.append]):
            ddp(batch(0)).sum().backward()
        assert [each.step for each in records] == [0, 2]
        ddp.close()


def test_a_second_observer_is_refused_and_the_first_goes_on() -> None:
    records: list[Record] = []
    (transport,) = InProcessTransport.create_group(1)
    with transport:
        ddp = DDP(small_model(), transport)
        with Observer(ddp, [records.append]):
            with pytest.raises(UsageError, match="already observed"), Observer(ddp):
                pass
            ddp(batch(0)).sum().backward()
        ddp.close()
    assert len(records) == 1


def test_a_folder_that_cannot_be_written_is_told_at_once_and_nothing_is_observed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (transport,) = InProcessTransport.create_group(1)
    with transport:
        ddp = DDP(small_model(), transport)
        for options in ({"sinks": tmp_path / "file" / "folder"}, {"trace": tmp_path / "file" / "folder"}):
            with pytest.raises(OSError), Observer(ddp, **options):  # type: ignore[arg-type]
                pass
        with Observer(ddp):
            ddp(batch(0)).sum().backward()
        ddp.close()


def test_an_error_in_the_loop_ends_observing_and_keeps_the_last_record() -> None:
    records: list[Record] = []
    (transport,) = InProcessTransport.create_group(1)
    with transport:
        ddp = DDP(small_model(), transport)
        with pytest.raises(ZeroDivisionError), Observer(ddp, [records.append]):
            ddp(batch(0)).sum().backward()
            1 / 0  # noqa: B018
        with Observer(ddp, [records.append]):
            pass
        ddp.close()
    assert [each.step for each in records] == [0]


def test_a_negative_interval_is_refused() -> None:
    (transport,) = InProcessTransport.create_group(1)
    with transport:
        ddp = DDP(small_model(), transport)
        with pytest.raises(ConfigError, match="consensus_every=-1"):
            Observer(ddp, consensus_every=-1)
        ddp.close()
