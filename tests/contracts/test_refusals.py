"""What makes no sense is refused before anything is sent: the right error, what to do, and a world that still works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from murmura import ConfigError, Transport, TransportClosed, UsageError
from worlds import World


def expanded() -> torch.Tensor:
    return torch.zeros(1).expand(4)


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


Call = Callable[[Transport], object]

# The call of one rank alone, the error, and words of its message
REFUSALS: dict[str, tuple[Call, type[Exception], tuple[str, ...]]] = {
    "mean of integers": (
        lambda t: t.all_reduce(torch.ones(3, dtype=torch.int32), "mean"), UsageError, ("int32", "Cast", "sum"),
    ),
    "mean of bool": (lambda t: t.all_reduce(torch.ones(3).bool(), "mean"), UsageError, ("bool", "Cast")),
    "sum of bool": (lambda t: t.all_reduce(torch.ones(3).bool()), UsageError, ("bool", "'max'", "'min'", "cast")),
    "minimum of complex": (
        lambda t: t.all_reduce(torch.ones(3, dtype=torch.complex64), "min"), UsageError, ("complex64", "order"),
    ),
    "maximum of complex": (
        lambda t: t.all_reduce(torch.ones(3, dtype=torch.complex128), "max"), UsageError, ("complex128", "order"),
    ),
    "dtype that cannot be reduced": (
        lambda t: t.all_reduce(torch.zeros(3, dtype=torch.float8_e4m3fn)), UsageError, ("float8", "Cast", "float32"),
    ),
    "unknown op": (
        lambda t: t.all_reduce(torch.ones(3), "average"),
        ConfigError,
        ("average", "'sum'", "'mean'", "'min'", "'max'", "'product'"),
    ),
    "unknown op, async": (
        lambda t: t.all_reduce(torch.ones(3), "avg", async_op=True), ConfigError, ("avg", "'mean'"),
    ),
    "out of another shape": (
        lambda t: t.all_reduce(torch.ones(3), out=torch.ones(4)), UsageError, ("float32[4]", "float32[3]", "empty_lik"),
    ),
    "out of another dtype": (
        lambda t: t.all_reduce(torch.ones(3), out=torch.ones(3).double()), UsageError, ("float64[3]", "empty_like"),
    ),
    "out expanded": (lambda t: t.all_reduce(torch.ones(4), out=expanded()), UsageError, ("expanded", ".clone()")),
    "in place into expanded": (lambda t: t.all_reduce(expanded()), UsageError, ("expanded", ".clone()")),
    "sparse": (lambda t: t.all_reduce(sparse()), UsageError, ("sparse", ".to_dense()")),
    "sparse, async": (lambda t: t.all_reduce(sparse(), async_op=True), UsageError, ("sparse", ".to_dense()")),
    "sparse out": (lambda t: t.all_reduce(torch.eye(3), out=sparse()), UsageError, ("sparse", ".to_dense()")),
    "meta": (lambda t: t.all_reduce(torch.ones(3, device="meta")), UsageError, ("meta",)),
    "broadcast from nowhere": (lambda t: t.broadcast(torch.ones(3), src=3), UsageError, ("src=3", "0 to 2")),
    "broadcast from a negative rank": (lambda t: t.broadcast(torch.ones(3), src=-1), UsageError, ("src=-1", "0 to 2")),
    "broadcast of sparse": (lambda t: t.broadcast(sparse()), UsageError, ("sparse", ".to_dense()")),
    "broadcast into expanded": (lambda t: t.broadcast(expanded(), src=1), UsageError, ("expanded", ".clone()")),
    "send to oneself": (lambda t: t.send(torch.ones(3), t.rank), UsageError, ("itself", "copy")),
    "receive from oneself": (lambda t: t.recv(torch.ones(3), t.rank), UsageError, ("itself", "copy")),
    "send to nowhere": (lambda t: t.send(torch.ones(3), 3), UsageError, ("dst=3", "0 to 2")),
    "receive from nowhere": (lambda t: t.recv(torch.ones(3), -2), UsageError, ("src=-2", "0 to 2")),
    "send of sparse": (lambda t: t.send(sparse(), (t.rank + 1) % 3), UsageError, ("sparse", ".to_dense()")),
    "receive into expanded": (
        lambda t: t.recv(expanded(), (t.rank + 1) % 3), UsageError, ("expanded", ".clone()"),
    ),
    "good and bad in one exchange": (
        lambda t: t.exchange([(torch.ones(3), (t.rank + 1) % 3), (torch.ones(3), 7)], []), UsageError, ("dst=7",),
    ),
    "bad in an asynchronous exchange": (
        lambda t: t.exchange([(torch.ones(3), t.rank)], [], async_op=True), UsageError, ("itself",),
    ),
    "scatter of another shape to oneself": (
        lambda t: t.scatter([torch.ones(1)] * 3, t.rank, out=torch.ones(4)), UsageError, ("float32[1]", "float32[4]"),
    ),
    "send to what is no number": (lambda t: t.send(torch.ones(3), "1"), UsageError, ("dst='1'", "0 to 2")),
    "send to a tensor": (
        lambda t: t.send(torch.ones(3), torch.tensor((t.rank + 1) % 3)), UsageError, ("dst=tensor", "int(dst)"),
    ),
    "receive from half a rank": (lambda t: t.recv(torch.ones(3), 0.5), UsageError, ("src=0.5", "0 to 2")),
    "broadcast from half a rank": (
        lambda t: t.broadcast(torch.ones(3), 0.5), UsageError, ("src=0.5", "0 to 2"),
    ),
    "send of a number": (lambda t: t.send(1.0, (t.rank + 1) % 3), UsageError, ("sends=1.0",)),
    "sum of a number": (lambda t: t.all_reduce(1.0), UsageError, ("tensor=1.0", "torch.tensor")),
    "sum into nothing": (lambda t: t.all_reduce(torch.ones(3), out=[]), UsageError, ("out=[]",)),
    "broadcast of nothing": (lambda t: t.broadcast(None), UsageError, ("tensor=None",)),
    "gather of a list": (lambda t: t.all_gather([1.0]), UsageError, ("tensor=[1.0]",)),
    "scatter into nothing": (lambda t: t.scatter(None, out=None), UsageError, ("out=None",)),
    "all to all of a number": (lambda t: t.all_to_all(3, []), UsageError, ("sends must hold",)),
    "exchange of what is no list": (lambda t: t.exchange(None, []), UsageError, ("sends=None", "pairs")),
    "exchange of what are no pairs": (lambda t: t.exchange([], [1]), UsageError, ("recvs", "1", "pairs")),
    "allocation of half an element": (lambda t: t.allocate(0.5), UsageError, ("numel=0.5",)),
    "allocation on no device": (lambda t: t.allocate(3, device="nowhere"), UsageError, ("device='nowhere'",)),
    "allocation of no dtype": (lambda t: t.allocate(3, "f4"), UsageError, ("dtype='f4'",)),
    "channel without a name": (lambda t: t.channel(["a"]), UsageError, ("name=['a']",)),
    "subgroup of a rank": (lambda t: t.subgroup(1), UsageError, ("ranks=1",)),
    "subgroup of nobody": (lambda t: t.subgroup([]), UsageError, ("at least one",)),
    "subgroup with a rank twice": (lambda t: t.subgroup([0, 1, 1]), UsageError, ("twice",)),
    "subgroup with an unknown rank": (lambda t: t.subgroup([0, 5]), UsageError, ("5", "0 to 2")),
}  # fmt: skip


def try_alone(transport: Transport) -> dict[str, tuple[Any, float]]:
    """Each refused call by one rank alone, a rank after another; then a sum with all."""
    told = {}
    for number, (name, (call, _, _)) in enumerate(REFUSALS.items()):
        outcome: Any = None
        if transport.rank == number % transport.world_size:
            try:
                outcome = f"returned {call(transport)}"
            except Exception as error:
                outcome = (type(error), str(error))
        told[name] = (outcome, transport.all_reduce(torch.ones(2))[0].item())
    return told


def test_refusals(world: World) -> None:
    by_rank = world.run(try_alone, 3)
    faults = []
    for number, (name, (_, kind, words)) in enumerate(REFUSALS.items()):
        outcome, _ = by_rank[number % 3][name]
        if isinstance(outcome, str):
            faults.append(f"{name}: {outcome}")
            continue
        raised, message = outcome
        if raised is not kind or not all(word in message for word in words):
            faults.append(f"{name}: {raised.__name__}: {message}")
        if any(told[name][1] != 3.0 for told in by_rank):
            faults.append(f"{name}: the next sum is wrong")
    assert not faults, "\n".join(faults)


def write_overlapping(transport: Transport) -> str:
    """Rows that share elements, though no stride is zero; every rank tries, so that nobody waits."""
    try:
        transport.all_reduce(torch.zeros(5).as_strided((4, 2), (1, 1)))
    except UsageError as error:
        return str(error)
    return "accepted"


def test_a_target_that_overlaps_itself(world: World) -> None:
    for told in world.run(write_overlapping, 2):
        assert ".clone()" in told


def try_closed(transport: Transport) -> list[str]:
    channel = transport.channel("other")
    channel.close()
    channel.close()
    told = []
    for call in (
        lambda: channel.all_reduce(torch.ones(2)),
        lambda: channel.broadcast(torch.ones(2)),
        lambda: channel.barrier(),
        lambda: channel.send(torch.ones(2), 1 - channel.rank),
        lambda: channel.all_reduce(torch.ones(2), async_op=True).wait(),
        lambda: channel.channel("again"),
    ):
        with pytest.raises(TransportClosed) as caught:
            call()
        told.append(str(caught.value))
    assert transport.all_reduce(torch.ones(2))[0] == 2.0
    return told


def test_a_closed_channel_says_so_and_the_world_goes_on(world: World) -> None:
    for told in world.run(try_closed, 2):
        assert all("closed" in message for message in told)


def try_alone_in_a_world_of_one(transport: Transport) -> list[str]:
    accepted = []
    for name, (call, kind, _) in REFUSALS.items():
        try:
            call(transport)
        except kind:
            continue
        except Exception as error:
            accepted.append(f"{name}: {error!r}")
        else:
            accepted.append(name)
    return accepted


def test_a_world_of_one_refuses_the_same(world: World) -> None:
    assert world.run(try_alone_in_a_world_of_one, 1) == [[]]
