"""In which order what a thread launches on several communicators runs on the device; on a GPU that is none."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fake_gpu import DEVICE, GPU, FakeStream, Owner, launch
from murmura.transports.cuda_launches import CudaLaunches
from murmura.transports.cuda_streams import OnStream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    return GPU(monkeypatch)


def in_a_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_operations_of_all_channels_have_one_order(gpu: GPU) -> None:
    owner = Owner()
    first = CudaLaunches(owner, DEVICE)
    second = CudaLaunches(owner, DEVICE)
    second.follow(first)
    with OnStream(first.order.stream):
        launch(first)
    launch(second)  # on the stream of training
    assert gpu.training.waited_for == [first.order.stream]
    with OnStream(first.order.stream):
        launch(second)
    assert first.order.stream.waited_for == [gpu.training]
    gpu.training.done()
    first.order.stream.done()
    for each in (first, second):
        each.close()


def test_threads_beside_training_have_no_common_order(gpu: GPU) -> None:
    owner = Owner()
    first = CudaLaunches(owner, DEVICE)
    second = CudaLaunches(owner, DEVICE)
    second.follow(first)
    launch(first)
    gpu.current = other = FakeStream()
    for act, waited_for in (
        (lambda: launch(second), []),
        (lambda: second.run("bucket 0", lambda: launch(second)), [gpu.training]),
    ):
        in_a_thread(act)
        assert other.waited_for == waited_for
    gpu.training.done()
    other.done()
    first.close()
    second.close()


def test_a_job_holds_for_what_was_split_off_and_in_its_thread_alone(gpu: GPU) -> None:
    """Backward launches in a thread of torch's, and within a job also on pairs and hosts, split off its channel."""
    owner = Owner()
    parent, split = CudaLaunches(owner, DEVICE), CudaLaunches(owner, DEVICE)
    split.follow(parent)
    launch(parent)
    gpu.current = other = FakeStream()
    names = []

    def reduce() -> None:
        launch(split)
        in_a_thread(lambda: names.append(split.named("all_gather #1")))

    in_a_thread(lambda: parent.run("bucket 3 of round 7", reduce).wait())
    assert split._pending[0].operation == "all_reduce #1 of bucket 3 of round 7"
    assert other.waited_for == [gpu.training]
    assert names == ["all_gather #1"]
    gpu.training.done()
    other.done()
    parent.close()
    split.close()


def test_worlds_in_which_one_thread_trains_have_one_order(gpu: GPU) -> None:
    """As two models that were connected one after the other: their communicators can hold each other up as well."""
    owner = Owner()
    generator, discriminator = CudaLaunches(owner, DEVICE), CudaLaunches(owner, DEVICE)
    assert generator.order is discriminator.order
    generator.run("bucket 0", lambda: launch(generator))
    with OnStream(discriminator.order.stream):
        discriminator.run("bucket 0", lambda: launch(discriminator))
    assert discriminator.order.stream.waited_for == [gpu.training]
    elsewhere: list[CudaLaunches] = []
    in_a_thread(lambda: elsewhere.append(CudaLaunches(owner, DEVICE)))
    assert elsewhere[0].order is not generator.order
    gpu.training.done()
    generator.order.stream.done()
    for each in (generator, discriminator, *elsewhere):
        each.close()


def test_the_order_is_that_of_the_thread_that_trains(gpu: GPU) -> None:
    """Connected in one thread, trained in another: synchronous operations there are in the order, too."""
    owner, first = Owner(), gpu.training
    world = CudaLaunches(owner, DEVICE)
    channel = CudaLaunches(owner, DEVICE)
    channel.follow(world)
    launch(world)
    before, trained = world.order, threading.Event()
    other, last = FakeStream(), FakeStream()

    def train() -> None:
        gpu.current = other
        own = CudaLaunches(owner, DEVICE)  # of another world
        launch(own)
        channel.trains_here()
        channel.trains_here()
        assert world.order is channel.order is own.order is not before
        launch(world)
        own.close()
        gpu.current = last
        launch(channel)
        trained.set()

    in_a_thread(train)
    assert trained.is_set()
    # What was launched before in the other thread, and in this one; then it is what the next operation waits for.
    assert world.order.stream.waited_for == [first, other]
    assert other.waited_for == [world.order.stream] * 2
    assert last.waited_for == [other]
    for stream in (first, other, last):
        stream.done()
    world.close()
    channel.close()
