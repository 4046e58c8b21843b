"""The contract of exchange, send and recv, and of split, on every transport."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.cases import REDUCIBLE, digest, random
from contracts.test_broadcast import special_bits
from murmura import PeerTimeout, Transport
from worlds import World, pairs, those

LENGTHS = (0, 1, 3, 1001, 300_007)
BEYOND_STAGING = 5_000_011  # in fp32, more than the 16 MiB that shared memory keeps for a pair of ranks


def values(length: int, dtype: torch.dtype, *key: int) -> Tensor:
    seed = 0
    for part in key:
        seed = 31 * seed + part + 1
    return random(length, dtype, seed).clone()


def shift(transport: Transport, cases: list[tuple[int, torch.dtype]]) -> list[list[str]]:
    """Everybody sends right and receives from the left, from and into memory of every kind."""
    size, rank = transport.world_size, transport.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    results = []
    for length, dtype in cases:
        mine = values(length, dtype, rank)
        allocated = transport.allocate(length, dtype)
        allocated.copy_(mine)
        outs = [torch.empty_like(mine), transport.allocate(length, dtype), torch.empty_like(mine)]
        for sent, out in zip((mine, mine, allocated), outs, strict=True):
            assert transport.exchange([(sent, right)], [(out, left)]) is None
        assert digest(mine) == digest(values(length, dtype, rank))  # what is sent is not touched
        results.append([digest(out) for out in outs])
    return results


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_shift_round_the_ring(world: World, size: int) -> None:
    cases = [(length, dtype) for length in LENGTHS[:4] for dtype in REDUCIBLE]
    cases += [(LENGTHS[4], dtype) for dtype in (torch.bool, torch.bfloat16, torch.float32, torch.complex128)]
    for rank, results in enumerate(world.run(shift, size, cases)):
        left = (rank - 1) % size
        assert results == [[digest(values(*case, left))] * 3 for case in cases]


def swap_with_all(transport: Transport, length: int) -> dict[int, str]:
    """Every pair at once, both ways, in one exchange; each pair its own size."""
    size, rank = transport.world_size, transport.rank
    peers = [peer for peer in range(size) if peer != rank]
    sends = [(values(length * (rank + 1) + peer, torch.float32, rank, peer), peer) for peer in peers]
    recvs = [(torch.zeros(length * (peer + 1) + rank), peer) for peer in peers]
    transport.exchange(sends, recvs[::-1])
    return {peer: digest(out) for out, peer in recvs}


@pairs(world=those(), size=[2, 3, 5, pytest.param(8, id="8", marks=pytest.mark.slow)], length=[0, 3, 300_007])
def test_all_pairs_both_ways_in_one_exchange(world: World, size: int, length: int) -> None:
    for rank, received in enumerate(world.run(swap_with_all, size, length)):
        assert received == {
            peer: digest(values(length * (peer + 1) + rank, torch.float32, peer, rank))
            for peer in range(size)
            if peer != rank
        }


MANY = (5, 0, 70_001, 3, 1, 200_001, 0, 1001)


def send_many(transport: Transport, one_by_one: bool) -> list[str]:
    """Several messages to one peer, of several sizes: in one exchange on one side, one by one on the other."""
    peer = 1 - transport.rank
    outs = [torch.zeros(length) for length in MANY]
    messages = [values(length, torch.float32, transport.rank, number) for number, length in enumerate(MANY)]
    if one_by_one and transport.rank == 0:
        for message in messages:
            transport.send(message, peer)
        for out in outs:
            assert transport.recv(out, peer) is out
    elif one_by_one:
        transport.exchange([], [(out, peer) for out in outs])
        transport.exchange([(message, peer) for message in messages], [])
    else:
        transport.exchange([(message, peer) for message in messages], [(out, peer) for out in outs])
    return [digest(out) for out in outs]


@pytest.mark.parametrize("one_by_one", [True, False])
def test_messages_arrive_in_the_order_they_were_sent(world: World, one_by_one: bool) -> None:
    for rank, received in enumerate(world.run(send_many, 2, one_by_one)):
        assert received == [digest(values(length, torch.float32, 1 - rank, n)) for n, length in enumerate(MANY)]


def exchange_beyond_staging(transport: Transport, on_arena: bool) -> str:
    peer = 1 - transport.rank
    mine = transport.allocate(BEYOND_STAGING) if on_arena else torch.empty(BEYOND_STAGING)
    mine.copy_(torch.arange(BEYOND_STAGING) + transport.rank)
    out = torch.empty(BEYOND_STAGING)
    transport.exchange([(mine, peer)], [(out, peer)])
    return digest(out)


@pytest.mark.parametrize("world", those(lambda world: world.arena))
@pytest.mark.parametrize("on_arena", [False, True], ids=["ordinary", "allocated"])
def test_more_than_the_staging_area(world: World, on_arena: bool) -> None:
    received = world.run(exchange_beyond_staging, 2, on_arena)
    assert received == [digest((torch.arange(BEYOND_STAGING) + peer).float()) for peer in (1, 0)]


def exchange_forms(transport: Transport) -> list[Tensor]:
    peer = 1 - transport.rank
    base = torch.arange(12.0).view(3, 4) + 100 * transport.rank
    frame = torch.full((3, 8), -1.0)
    target, leaf = torch.zeros(4, 3).t(), torch.nn.Parameter(torch.zeros(3, 4))
    scalar, negated, last = torch.zeros(()), torch._neg_view(torch.zeros(3, 4)), torch.zeros(3, 4)
    transport.exchange(
        [
            (base.t().contiguous().t(), peer),
            (torch.tensor(float(transport.rank)).expand(3, 4), peer),  # may be sent, though not received into
            (base[:, ::2], peer),
            (base.clone().requires_grad_(), peer),
            (base.sum(), peer),
            (torch._neg_view(base.clone()), peer),
        ],
        [(target, peer), (leaf, peer), (frame[:, 1:8:4], peer), (negated, peer), (scalar, peer), (last, peer)],
    )
    return [target, leaf.detach(), frame, negated.resolve_neg(), scalar, last]


def test_tensors_of_every_form(world: World) -> None:
    for rank, (target, leaf, frame, negated, scalar, last) in enumerate(world.run(exchange_forms, 2)):
        theirs = torch.arange(12.0).view(3, 4) + 100 * (1 - rank)
        assert torch.equal(target, theirs)
        assert torch.equal(leaf, torch.full((3, 4), float(1 - rank)))
        assert torch.equal(frame[:, 1:8:4], theirs[:, ::2])
        assert frame.eq(-1.0).sum() == 24 - 6
        assert torch.equal(negated, theirs)
        assert torch.equal(scalar, theirs.sum())
        assert torch.equal(last, -theirs)


def exchange_bits(transport: Transport, length: int) -> list[str]:
    out = torch.zeros(length)
    if transport.rank == 0:
        transport.send(special_bits(length), 1)
        transport.recv(out, 1)
    else:
        transport.recv(out, 0)
        transport.send(out, 0)
    return [digest(out)]


@pytest.mark.parametrize("length", [10, LENGTHS[4]])
def test_bits_pass_unchanged(world: World, length: int) -> None:
    assert world.run(exchange_bits, 2, length) == [[digest(special_bits(length))]] * 2


def exchange_asynchronously(transport: Transport) -> list[float]:
    size, rank = transport.world_size, transport.rank
    outs, tickets = [], []
    for number in range(8):
        out = torch.zeros(30_000 * (number % 3) + 1)
        sent = torch.full_like(out, float(10 * rank + number))
        ticket = transport.exchange([(sent, (rank + 1) % size)], [(out, (rank - 1) % size)], async_op=True)
        outs.append(out)
        tickets.append(ticket)
    for ticket in reversed(tickets):
        assert ticket.wait() is None
        assert ticket.done()
    return [out.unique().item() for out in outs]


@pytest.mark.parametrize("size", [2, 3])
def test_asynchronous_exchanges_keep_their_order(world: World, size: int) -> None:
    for rank, received in enumerate(world.run(exchange_asynchronously, size)):
        assert received == [10.0 * ((rank - 1) % size) + number for number in range(8)]


def send_and_receive_at_once(transport: Transport) -> list[float]:
    """A rank that only sends and one that only receives, asynchronously, and back."""
    outs = [torch.zeros(1000) for _ in range(4)]
    if transport.rank == 0:
        tickets = [transport.isend(torch.full((1000,), float(number)), 1) for number in range(4)]
    else:
        tickets = [transport.irecv(out, 0) for out in outs]
    for ticket in tickets:
        ticket.wait()
    return [out[0].item() for out in outs]


def test_isend_and_irecv(world: World) -> None:
    assert world.run(send_and_receive_at_once, 2) == [[0.0] * 4, [0.0, 1.0, 2.0, 3.0]]


def mix_with_collectives(transport: Transport) -> list[float]:
    """Exchanges between some ranks do not count as collectives of all."""
    seen = []
    for turn in range(20):
        tensor = torch.full((3,), float(turn))
        if turn % 2 and transport.rank < 2:
            out = torch.zeros(turn)
            transport.exchange([(torch.full((turn,), float(transport.rank)), 1 - transport.rank)],
                               [(out, 1 - transport.rank)])  # fmt: skip
            assert out.eq(1.0 - transport.rank).all()
        transport.all_reduce(tensor)
        seen.append(tensor[0].item())
    return seen


def test_exchanges_between_collectives(world: World) -> None:
    assert world.run(mix_with_collectives, 3) == [[3.0 * turn for turn in range(20)]] * 3


# Split


def reorder(transport: Transport) -> tuple[int, int, list[int], float, float] | None:
    group = transport.subgroup([3, 0, 2])
    if group is None:
        return None
    mine = torch.tensor(float(transport.rank))
    root = group.broadcast(mine.clone(), src=0).item()
    total = group.all_reduce(mine).item()
    return group.rank, group.world_size, list(group.hosts), root, total


def test_a_subgroup_numbers_its_ranks_in_the_order_given(world: World) -> None:
    hosts = [world.hosts(4)[rank] for rank in (3, 0, 2)]
    assert world.run(reorder, 4) == [(1, 3, hosts, 3.0, 5.0), None, (2, 3, hosts, 3.0, 5.0), (0, 3, hosts, 3.0, 5.0)]


def order_of_summation(transport: Transport, length: int) -> tuple[str, str]:
    """A subgroup sums in the order of its own ranks."""
    group = transport.subgroup([2, 1, 0])
    return (
        digest(group.all_reduce(values(length, torch.float32, transport.rank))),
        digest(transport.all_reduce(values(length, torch.float32, 2 - transport.rank))),
    )


@pytest.mark.parametrize("world", those(lambda world: world.place is None))  # else hosts matter as well
@pytest.mark.parametrize("length", [1001, LENGTHS[4]])
def test_a_subgroup_sums_in_the_order_of_its_own_ranks(world: World, length: int) -> None:
    for in_group, in_world in world.run(order_of_summation, 3, length):
        assert in_group == in_world


def nest(transport: Transport) -> list[Any]:
    """Pairs, a pair's channel, one rank alone, everybody again."""
    halves = [transport.split("halves", ranks) for ranks in ([0, 1], [2, 3])]
    half = halves[transport.rank // 2]
    assert half is not None
    assert halves[1 - transport.rank // 2] is None
    channel = half.channel("inner")
    alone = half.subgroup([half.rank])
    leaders = transport.subgroup([0, 2])
    one = torch.ones(1)
    seen = [
        half.all_reduce(one * transport.rank).item(),
        channel.all_reduce(one * transport.rank).item(),
        alone.all_reduce(one * transport.rank).item(),
        leaders.all_reduce(one * transport.rank).item() if leaders else None,
        transport.all_reduce(one * transport.rank).item(),
    ]
    for group in (alone, channel, half):
        group.close()
    transport.barrier()
    return seen


def test_groups_in_groups(world: World) -> None:
    assert world.run(nest, 4) == [
        [1.0, 1.0, 0.0, 2.0, 6.0],
        [1.0, 1.0, 1.0, None, 6.0],
        [5.0, 5.0, 2.0, 2.0, 6.0],
        [5.0, 5.0, 3.0, None, 6.0],
    ]


def wait_on_a_channel(transport: Transport) -> list[float]:
    """Rank 1 comes to the channel only after everybody has been to the world and another channel."""
    slow, fast = transport.channel("slow"), transport.channel("fast")
    tensor = torch.ones(100_000)
    ticket = None if transport.rank == 1 else slow.all_reduce(tensor, async_op=True)
    meanwhile = [(length, group) for length in (1, 100_000) for group in (transport, fast)]
    seen = [group.all_reduce(torch.full((length,), 2.0)).max().item() for length, group in meanwhile]
    if ticket is None:
        slow.all_reduce(tensor)
    else:
        ticket.wait()
    return [*seen, tensor.max().item()]


@pytest.mark.parametrize("size", [2, 3])
def test_a_channel_waits_for_nothing_but_itself(world: World, size: int) -> None:
    assert world.run(wait_on_a_channel, size) == [[2.0 * size] * 4 + [1.0 * size]] * size


def split_again(transport: Transport) -> list[float]:
    """The same name twice is two channels; others between them change nothing."""
    first = transport.channel("name")
    between = transport.subgroup([0, 1])
    second = transport.channel("name")
    tickets = [
        group.all_reduce(torch.full((5,), weight * (transport.rank + 1.0)), async_op=True)
        for group, weight in ((first, 1.0), (second, 100.0))
    ]
    if between is not None:
        between.barrier()
    return [ticket.wait()[0].item() for ticket in reversed(tickets)]


def test_the_same_name_twice_is_two_channels(world: World) -> None:
    assert world.run(split_again, 3) == [[600.0, 6.0]] * 3


def split_where_a_buffer_was(transport: Transport) -> list[float]:
    """A channel's words may lie where a tensor lay; nothing may be read of what the tensor held."""
    seen = []
    for turn in range(3):
        for length in (100_000, 200_000):
            buffer = transport.allocate(length)
            buffer.view(torch.int64).fill_(2**40)
            transport.all_reduce(buffer)
            del buffer
        channel = transport.channel(f"channel {turn}")
        channel.barrier()
        seen.append(channel.all_reduce(torch.ones(3), timeout=5.0)[0].item())
        out = torch.zeros(4)
        peer = (transport.rank + 1) % 2
        if transport.rank < 2:
            channel.exchange([(torch.ones(4), peer)], [(out, peer)], timeout=5.0)
            assert out.eq(1.0).all()
    return seen


def test_a_channel_made_after_a_buffer_was_freed(world: World) -> None:
    assert world.run(split_where_a_buffer_was, 3) == [[3.0] * 3] * 3


def use_channels_in_threads(transport: Transport) -> list[float]:
    """Two threads of a rank, each on its own channel, both in synchronous calls."""
    channels = [transport.channel(name) for name in ("a", "b")]
    tensors = [torch.full((1000,), float(number + 1)) for number in range(2)]

    def work(number: int) -> None:
        for _ in range(30):
            channels[number].all_reduce(tensors[number], "mean")
            channels[number].barrier()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [tensor[0].item() for tensor in tensors]


def test_threads_on_channels_of_their_own(world: World) -> None:
    assert world.run(use_channels_in_threads, 2) == [[1.0, 2.0]] * 2


def wait_too_short(transport: Transport) -> str | None:
    group = transport.subgroup([1, 2])
    if group is None or transport.rank == 2:
        transport.barrier()
        if group is not None:
            group.all_reduce(torch.ones(1))
        return None
    ticket = group.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(PeerTimeout) as late:
        ticket.wait(0.01)
    transport.barrier()
    ticket.wait()
    return str(late.value)


def test_a_ticket_of_a_subgroup_names_the_rank_of_the_world(world: World) -> None:
    assert "all_reduce on rank 1 had not ended" in world.run(wait_too_short, 3)[1]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def hear(self) -> None:
        self.count += 1


def count_calls(transport: Transport) -> int:
    counter = Counter()
    transport.before_collectives(counter.hear)
    for length in (3, 3, 200_000):  # small ones are prepared for their next call
        transport.all_reduce(torch.ones(length))
    return counter.count


def test_a_listener_hears_once_of_an_all_reduce(world: World) -> None:
    assert world.run(count_calls, 2) == [3, 3]
