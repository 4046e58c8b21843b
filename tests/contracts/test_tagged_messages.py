"""The contract of tagged messages, on every transport that has them."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch

from contracts.cases import random
from murmura import PeerLost, PeerTimeout, Transport, TransportError, UsageError
from murmura.transports.process_group_messages import ProcessGroupMessages
from murmura.transports.shared_memory import tagged_messages
from murmura.transports.shared_memory.control_block import ASLEEP
from worlds import World, those

FAST_GLOO = [pytest.param(World("gloo", "processes", "gloo"), id="gloo_fast")]
HAVE_THEM = those(lambda world: world.name not in ("exchange_only", "throttled"))
LENGTHS = (0, 1, 1001, 300_007)


def cross(transport: Transport) -> None:
    """Every rank sends to every other before anybody receives; tags are received in another order."""
    rank, size = transport.rank, transport.world_size
    messages = transport.tagged_messages()
    sent = []
    for dst in range(size):
        for tag in (0, 1, 2):
            for number, length in enumerate(LENGTHS):
                sent.append(messages.isend(random(length, torch.float32, 100 * rank + 10 * tag + number), dst, tag))
    for src in range(size):
        for tag in (2, 0, 1):
            outs = [torch.zeros(length) for length in LENGTHS]
            received = [messages.irecv(out, src, tag) for out in outs]
            for each in reversed(received):
                each.wait()
                assert each.done()
                assert each.source == src
            for number, out in enumerate(outs):
                assert torch.equal(out, random(len(out), torch.float32, 100 * src + 10 * tag + number))
    for each in sent:
        each.wait()
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", HAVE_THEM)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tags_keep_messages_apart(world: World, size: int) -> None:
    world.run(cross, size)


def from_anybody(transport: Transport) -> None:
    messages = transport.tagged_messages()
    if transport.rank:
        columns = torch.full((5, 2), float(transport.rank))[:, 0]  # not contiguous
        messages.isend(columns, 0, tag=7).wait()  # and nothing of it is kept
        messages.isend(columns[:1], 0, tag=8).wait()  # contiguous, for it is alone, but of stride 2
    else:
        seen = set()
        for _ in range(transport.world_size - 1):
            out = torch.zeros(5, 2)[:, 1]
            received = messages.irecv(out, None, 7)
            received.wait()
            assert torch.equal(out, torch.full((5,), float(received.source)))
            messages.irecv(out[:1], received.source, 8).wait()
            assert out[0].item() == received.source
            seen.add(received.source)
        assert seen == set(range(1, transport.world_size))
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", HAVE_THEM)
def test_messages_from_any_source(world: World) -> None:
    world.run(from_anybody, 4)


def many(transport: Transport) -> None:
    """More messages in flight than a ring holds, in both directions, beside collectives."""
    messages, peer = transport.tagged_messages(), 1 - transport.rank
    out = torch.zeros(1)
    for start in (0, 200, 400):
        for number in range(start, start + 200):
            messages.isend(torch.tensor([float(number)]), peer, number % 2)
        transport.all_reduce(torch.ones(3))
        for tag in (1, 0):
            for number in range(start + tag, start + 200, 2):
                messages.irecv(out, peer, tag).wait()
                assert out.item() == number
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", HAVE_THEM)
def test_many_messages(world: World) -> None:
    world.run(many, 2)


def overtake(transport: Transport) -> None:
    """The first of many messages is received last, and nothing at all before an all-reduce that both ranks call."""
    messages, peer = transport.tagged_messages(), 1 - transport.rank
    out = torch.zeros(1)
    messages.isend(torch.tensor([-1.0]), peer, 1).wait()
    for number in range(600):
        messages.isend(torch.tensor([float(number)]), peer, 2).wait()
    transport.all_reduce(torch.ones(3))
    for number in range(600):
        messages.irecv(out, peer, 2).wait()
        assert out.item() == number
        messages.isend(torch.tensor([float(number)]), peer, 3).wait()
        messages.irecv(out, peer, 3).wait()
        assert out.item() == number
    messages.irecv(out, peer, 1).wait()
    assert out.item() == -1.0
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", HAVE_THEM)
def test_a_message_that_is_not_received_holds_up_no_other(world: World) -> None:
    world.run(overtake, 2, timeout=10)


def fill_up(transport: Transport) -> int:
    """Messages to a rank that has received all but the oldest of those before."""
    messages, out = transport.tagged_messages(), torch.zeros(10_000)
    assert isinstance(messages, tagged_messages.SharedMemoryMessages)
    if transport.rank == 0:
        messages.isend(out, 1, 1).wait()
        for _ in range(500):
            messages.isend(out, 1, 2).wait()
            messages.irecv(out, 1, 2).wait()
        num_buffers = len(messages._buffers.places)
    else:
        for _ in range(500):
            messages.irecv(out, 0, 2).wait()
            messages.isend(out, 0, 2).wait()
        messages.irecv(out, 0, 1).wait()
        num_buffers = 0
    transport.barrier()
    messages.close()
    return num_buffers


@pytest.mark.parametrize("world", those(lambda world: world.name == "shared_memory"))
def test_what_was_received_is_freed_in_any_order(world: World) -> None:
    assert world.run(fill_up, 2, timeout=10)[0] < 20


def wait_in_threads(transport: Transport) -> None:
    """One thread waits for a message; the others can still receive, send, and give up in their own time."""
    messages = transport.tagged_messages()
    first, second, short = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    if transport.rank == 0:
        waiting = messages.irecv(first, 1, 1)
        thread = threading.Thread(target=waiting.wait)
        thread.start()
        other = messages.irecv(second, 1, 2)
        messages.isend(torch.ones(1), 1, 3).wait()
        other.wait(20)
        thread.join(20)
        assert first.item() == second.item() == 7.0
    else:
        messages.irecv(short, 0, 3).wait(5)  # the others come only after this one
        messages.isend(torch.full((1,), 7.0), 0, 1)
        messages.isend(torch.full((1,), 7.0), 0, 2)
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", HAVE_THEM)
def test_a_thread_that_waits_holds_up_no_other(world: World) -> None:
    world.run(wait_in_threads, 2, timeout=10)


def give_up_in_time(transport: Transport) -> None:
    messages = transport.tagged_messages()
    if transport.rank == 0:
        ended = []

        def wait_long() -> None:
            with pytest.raises(PeerTimeout):  # which the other thread had
                messages.irecv(torch.zeros(1), 1, 1).wait()
            ended.append(True)

        thread = threading.Thread(target=wait_long)
        thread.start()
        if isinstance(messages, tagged_messages.SharedMemoryMessages):
            while not messages._control.read(0, ASLEEP):
                time.sleep(0.001)
        began = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"recv\(src=1, tag=2\)") as caught:
            messages.irecv(torch.zeros(1), 1, 2).wait(0.2)
        assert (caught.value.rank, caught.value.peer) == (0, 1)
        thread.join(10)
        assert ended == [True]
        assert time.monotonic() - began < 8
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", HAVE_THEM)
def test_every_thread_has_its_own_deadline(world: World) -> None:
    world.run(give_up_in_time, 2, timeout=20)


def poll(transport: Transport) -> None:
    """Whoever only asks whether a message has come learns it; the tensor then holds it."""
    messages, peer = transport.tagged_messages(), 1 - transport.rank
    for out in (torch.zeros(3), torch.zeros(3, 2)[:, 0]):
        received = messages.irecv(out, peer, 5)
        transport.barrier()
        assert not received.done()
        transport.barrier()
        assert messages.isend(torch.full((3,), 1.0 + transport.rank), peer, 5).done()
        until = time.monotonic() + 20
        while not received.done():
            assert time.monotonic() < until
            time.sleep(0.001)
        assert out.tolist() == [1.0 + peer] * 3
        assert received.source == peer
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", [*HAVE_THEM, *FAST_GLOO])
def test_polling_ends(world: World) -> None:
    world.run(poll, 2)


def hold_nothing(transport: Transport) -> None:
    """Messages of one tag were received, one of another tag was not."""
    messages, out = transport.tagged_messages(), torch.zeros(1000)
    assert isinstance(messages, ProcessGroupMessages)
    if transport.rank == 0:
        messages.isend(out, 1, 7).wait()
        for _ in range(50):
            messages.isend(out, 1, 0).wait()
        transport.barrier()
        until = time.monotonic() + 20
        while messages._streams.in_flight(sends=True) > 1:
            assert time.monotonic() < until
            time.sleep(0.001)
    else:
        for _ in range(50):
            messages.irecv(out, 0, 0).wait()
        transport.barrier()
    transport.barrier()
    if transport.rank == 1:
        messages.irecv(out, 0, 7).wait()
    transport.barrier()
    messages.close()


def test_a_group_holds_no_message_that_was_received() -> None:
    FAST_GLOO[0].values[0].run(hold_nothing, 2)


def send_and_leave(transport: Transport) -> None:
    messages, out = transport.tagged_messages(), torch.zeros(1000)
    if transport.rank == 0:
        messages.isend(torch.ones(1000), 1, 7).wait()
        transport.barrier()
    else:
        transport.barrier()
        time.sleep(0.3)  # while the other closes, and would be gone
        messages.irecv(out, 0, 7).wait()
        assert out.sum() == 1000
    messages.close()


@pytest.mark.parametrize("world", [*HAVE_THEM, *FAST_GLOO])
def test_what_was_sent_can_be_received_from_a_rank_that_closes(world: World) -> None:
    world.run(send_and_leave, 2)


def poll_for_one_who_leaves(transport: Transport) -> None:
    """Whoever only asks whether a message has come learns that its sender has left, after what it had sent."""
    messages, out = transport.tagged_messages(), torch.zeros(3)
    if transport.rank == 0:
        received = [messages.irecv(out, *each) for each in ((1, 5), (1, 6))]
        transport.barrier()
        until = time.monotonic() + 20
        for each in received:
            while not each.done():
                assert time.monotonic() < until
                time.sleep(0.001)
        received[0].wait()
        assert out.tolist() == [1.0] * 3
        with pytest.raises(PeerLost, match="rank 1") as lost:
            received[1].wait()
        assert lost.value.peer == 1
    else:
        messages.isend(torch.ones(3), 0, 5).wait()
        transport.barrier()
        messages.close()


@pytest.mark.parametrize("world", [*HAVE_THEM, *FAST_GLOO])
def test_polling_for_a_rank_that_leaves_ends(world: World) -> None:
    world.run(poll_for_one_who_leaves, 2, timeout=30)


def to_itself(transport: Transport) -> None:
    """A rank receives from itself what another of its threads sends later, and else gives up in time."""
    messages, rank = transport.tagged_messages(), transport.rank
    out = torch.zeros(2)
    received = messages.irecv(out, rank, 1)
    assert not received.done()
    thread = threading.Thread(target=lambda: messages.isend(torch.ones(2), rank, 1).wait())
    thread.start()
    received.wait(20)
    thread.join()
    assert out.tolist() == [1.0, 1.0]
    began = time.monotonic()
    with pytest.raises(PeerTimeout, match=rf"recv\(src={rank}, tag=2\)"):
        messages.irecv(out, rank, 2).wait(0.3)
    assert 0.3 <= time.monotonic() - began < 10
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", [*HAVE_THEM, *FAST_GLOO])
def test_a_rank_receives_from_itself(world: World) -> None:
    world.run(to_itself, 2, timeout=20)


def name_their_own(transport: Transport) -> list[str]:
    """Threads that wait for different ranks name them, when the transport is aborted under them."""
    messages, told = transport.tagged_messages(), []
    if transport.rank == 0:

        def wait_for(peer: int) -> None:
            with pytest.raises(TransportError) as caught:
                messages.irecv(torch.zeros(1), peer, peer).wait()
            told.append(str(caught.value.operation))

        threads = [threading.Thread(target=wait_for, args=(peer,)) for peer in (1, 2)]
        for thread in threads:
            thread.start()
        with pytest.raises(PeerTimeout, match="recv\\(src=any, tag=3\\)"):
            messages.irecv(torch.zeros(1), None, 3).wait(0.3)
        for thread in threads:
            thread.join(10)
    transport.barrier()
    messages.close()
    return sorted(told)


@pytest.mark.parametrize("world", [*HAVE_THEM, *FAST_GLOO])
def test_errors_of_several_threads_name_the_operation_of_each(world: World) -> None:
    assert world.run(name_their_own, 3, timeout=20)[0] == ["recv(src=1, tag=1)", "recv(src=2, tag=2)"]


def close_under_a_wait(transport: Transport, how: str) -> None:
    messages = transport.tagged_messages()
    if transport.rank == 0:
        received = messages.irecv(torch.zeros(1), 1, 1)
        end = messages.close if how == "close" else lambda: transport.abort(RuntimeError("stop"))
        threading.Timer(0.2, end).start()
        began = time.monotonic()
        with pytest.raises(TransportError):
            received.wait()
        assert time.monotonic() - began < 5
        assert received.done()
    with contextlib.suppress(TransportError):  # rank 1 waits here until the other has aborted, or comes
        transport.barrier()


@pytest.mark.parametrize("how", ["close", "abort"])
@pytest.mark.parametrize("world", [*HAVE_THEM, *FAST_GLOO])
def test_whoever_closes_or_aborts_ends_the_waits(world: World, how: str) -> None:
    world.run(close_under_a_wait, 2, how, timeout=20)


def refuse(transport: Transport) -> None:
    messages = transport.tagged_messages()
    for call in (
        lambda: messages.isend(torch.zeros(1), 9),
        lambda: messages.irecv(torch.zeros(1), -1),
        lambda: messages.irecv(torch.zeros(1).expand(3), 0),
    ):
        with pytest.raises(UsageError):
            call()
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", HAVE_THEM)
def test_what_makes_no_sense_is_refused(world: World) -> None:
    world.run(refuse, 2)


def other_size(transport: Transport) -> None:
    """The tensor of a message that is refused is the sender's again, as if it had been received."""
    tagged_messages.BUFFERED_BYTES = 0  # so that a send waits for that
    messages, peer = transport.tagged_messages(), 1 - transport.rank
    sent = messages.isend(torch.zeros(3), peer)
    with pytest.raises(UsageError, match=f"rank {transport.rank} in recv.*12 bytes came from rank {peer}"):
        messages.irecv(torch.zeros(4), peer).wait()
    sent.wait(10)
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", those(lambda world: world.name in ("in_process", "shared_memory")))
def test_a_message_of_another_size_is_refused(world: World) -> None:
    world.run(other_size, 2)
