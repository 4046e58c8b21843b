"""Every operation of a transport, ready to be performed again and again; each result is checked, to the bit."""

from collections.abc import Callable
from typing import Any

import torch
from culprits import LARGE, SMALL
from scenario import Stage


def _barrier(stage: Stage) -> Callable[[], None]:
    return stage.transport.barrier


def _broadcast(numel: int, src: int, allocated: bool = False) -> Callable[[Stage], Callable[[], None]]:
    def prepare(stage: Stage) -> Callable[[], None]:
        tensor = stage.transport.allocate(numel) if allocated else torch.zeros(numel)
        expected = torch.full((numel,), float(src))

        def perform() -> None:
            tensor.fill_(stage.rank)
            stage.transport.broadcast(tensor, src)
            assert torch.equal(tensor, expected)

        return perform

    return prepare


def _async_all_reduce(numel: int) -> Callable[[Stage], Callable[[], None]]:
    def prepare(stage: Stage) -> Callable[[], None]:
        n = stage.world_size
        tensors = [torch.zeros(numel) for _ in range(3)]

        def perform() -> None:
            for tensor in tensors:
                tensor.fill_(stage.rank + 1)
            tickets: list[Any] = [stage.transport.all_reduce(tensor, async_op=True) for tensor in tensors]
            errors: list[Exception] = []
            for ticket in tickets:
                try:
                    result = ticket.wait()
                except Exception as error:
                    errors.append(error)
                else:
                    assert not errors, "an operation succeeded after one before it had failed"
                    assert torch.equal(result, torch.full((numel,), float(n * (n + 1) // 2)))
            if errors:
                assert {type(error) for error in errors} == {type(errors[0])}
                assert all(ticket.done() for ticket in tickets)
                raise errors[0]

        return perform

    return prepare


def ring(numel: int) -> Callable[[Stage], Callable[[], None]]:
    """Every rank sends to the next and receives from the one before, in one exchange."""

    def prepare(stage: Stage) -> Callable[[], None]:
        n, rank = stage.world_size, stage.rank
        outgoing, incoming = torch.full((numel,), float(rank)), torch.zeros(numel)

        def perform() -> None:
            stage.transport.exchange([(outgoing, (rank + 1) % n)], [(incoming, (rank - 1) % n)])
            assert torch.equal(incoming, torch.full((numel,), float((rank - 1) % n)))

        return perform

    return prepare


def _star(numel: int, sends: bool) -> Callable[[Stage], Callable[[], None]]:
    """Rank 0 sends to every other rank in turn, or receives from it."""

    def prepare(stage: Stage) -> Callable[[], None]:
        tensor = torch.zeros(numel)

        def perform() -> None:
            for peer in range(1, stage.world_size):
                if stage.rank == 0:
                    stage.mark()
                    (stage.transport.send if sends else stage.transport.recv)(tensor, peer)
                elif stage.rank == peer:
                    (stage.transport.recv if sends else stage.transport.send)(tensor, 0)

        return perform

    return prepare


def _reduce(stage: Stage) -> Callable[[], None]:
    tensor, n = torch.zeros(SMALL), stage.world_size

    def perform() -> None:
        stage.transport.reduce(tensor.fill_(stage.rank + 1), 1)
        assert stage.rank != 1 or torch.equal(tensor, torch.full((SMALL,), float(n * (n + 1) // 2)))

    return perform


def _reduce_scatter(stage: Stage) -> Callable[[], None]:
    tensor, n = torch.zeros(SMALL), stage.world_size

    def perform() -> None:
        chunk = stage.transport.reduce_scatter(tensor.fill_(stage.rank + 1))
        assert torch.equal(chunk, torch.full_like(chunk, float(n * (n + 1) // 2)))

    return perform


def _all_gather(stage: Stage) -> Callable[[], None]:
    tensor = torch.full((SMALL + stage.rank,), float(stage.rank))

    def perform() -> None:
        for rank, each in enumerate(stage.transport.all_gather(tensor)):
            assert torch.equal(each, torch.full((SMALL + rank,), float(rank)))

    return perform


def _gather(stage: Stage) -> Callable[[], None]:
    tensor = torch.full((SMALL,), float(stage.rank))

    def perform() -> None:
        gathered = stage.transport.gather(tensor, 1)
        assert gathered is None or [float(each[-1]) for each in gathered] == list(range(stage.world_size))

    return perform


def _scatter(stage: Stage) -> Callable[[], None]:
    tensors = [torch.full((SMALL,), float(rank)) for rank in range(stage.world_size)]
    out = torch.zeros(SMALL)

    def perform() -> None:
        stage.transport.scatter(tensors if stage.rank == 1 else None, 1, out=out)
        assert torch.equal(out, tensors[stage.rank])

    return perform


def _all_to_all(stage: Stage) -> Callable[[], None]:
    n, rank = stage.world_size, stage.rank
    sends = [torch.full((SMALL + rank * peer,), float(10 * rank + peer)) for peer in range(n)]
    recvs = [torch.zeros(SMALL + rank * peer) for peer in range(n)]

    def perform() -> None:
        stage.transport.all_to_all(sends, recvs)
        assert [float(each[-1]) for each in recvs] == [10 * peer + rank for peer in range(n)]

    return perform


OPERATIONS: dict[str, Callable[[Stage], Callable[[], None]]] = {
    "barrier": _barrier,
    "small broadcast": _broadcast(SMALL, 0),
    "small broadcast from rank 1": _broadcast(SMALL, 1),
    "staged broadcast": _broadcast(LARGE, 0),
    "staged broadcast from rank 1": _broadcast(LARGE, 1),
    "allocated broadcast": _broadcast(LARGE, 0, allocated=True),
    "small async all_reduce": _async_all_reduce(SMALL),
    "large async all_reduce": _async_all_reduce(LARGE),
    "small ring": ring(SMALL),
    "large ring": ring(5 * LARGE),  # more than a pair's staging area holds, so that senders wait in the middle
    "sends": _star(SMALL, sends=True),
    "large sends": _star(5 * LARGE, sends=True),
    "recvs": _star(SMALL, sends=False),
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
