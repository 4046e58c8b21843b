"""The contract of tagged messages, on every transport that has them."""

from __future__ import annotations

import pytest
import torch

from contracts.cases import random
from murmura import Transport, UsageError
from worlds import World, those

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
    else:
        seen = set()
        for _ in range(transport.world_size - 1):
            out = torch.zeros(5, 2)[:, 1]
            received = messages.irecv(out, None, 7)
            received.wait()
            assert torch.equal(out, torch.full((5,), float(received.source)))
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
    messages, peer = transport.tagged_messages(), 1 - transport.rank
    messages.isend(torch.zeros(3), peer)
    with pytest.raises(UsageError, match="12 bytes came from rank"):
        messages.irecv(torch.zeros(4), peer).wait()
    transport.barrier()
    messages.close()


@pytest.mark.parametrize("world", those(lambda world: world.name in ("in_process", "shared_memory")))
def test_a_message_of_another_size_is_refused(world: World) -> None:
    world.run(other_size, 2)
