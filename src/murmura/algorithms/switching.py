"""From one running algorithm to another on a live model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Replica
from murmura.algorithms.weights import FlatWeights
from murmura.buckets.flat import FlatTensors, plain_memory
from murmura.collectives.deadline import Deadline
from murmura.errors import UsageError
from murmura.types import Exchanges, ReduceOp


def replace_algorithm(running: AlgorithmImpl, algorithm: Algorithm, replica: Replica) -> AlgorithmImpl:
    """Close `running` and return what runs `algorithm`, not yet set up. Collective, between rounds.

    Replicas that `running` let differ start again from the mean of their weights and of their optimizers' moments;
    moments of an optimizer that is not known yet are averaged when it is. If `algorithm` is refused, `running` goes on.
    """
    successor = algorithm.reify(replica.transport)
    running.settle()
    whole = Deadline(replica.transport.timeout)
    running.close()  # a loop that averages by the clock waits here for the others' votes
    if running.exchanges is Exchanges.WEIGHTS:
        _average_weights(replica, running.weight_in_mean, max(whole.remaining, whole.timeout / 2))
        replica.moments_may_differ = True
    if successor.exchanges is Exchanges.WEIGHTS:
        replica.moments_may_differ = False
    elif replica.moments_may_differ:
        average_moments(replica, replica.optimizers)
    return successor


def _average_weights(replica: Replica, weight: float, timeout: float) -> None:
    weights = FlatWeights(replica, with_frozen=True)  # what is frozen now may have been trained apart
    flats = weights.allocate(replica.transport.allocate)
    for flat in flats:
        if weight != 1:
            flat.mul_(weight)
        replica.transport.all_reduce(flat, ReduceOp.MEAN, timeout=timeout)
    weights.write(flats)


@torch.no_grad()
def average_moments(replica: Replica, optimizers: Sequence[Optimizer]) -> None:
    """Average the moments of `optimizers`: with different moments, equal weights would drift apart again."""
    _complete_moments(replica, optimizers)
    moments = list(_moments(replica, optimizers))
    layout = zlib.crc32("; ".join(name for name, _ in moments).encode())
    least, most = _extremes(replica, layout)
    if least != most:
        raise UsageError(
            "the ranks' optimizers do not hold the same moments, so they cannot be averaged. Build the same optimizers "
            "on every rank, or new ones before you change the algorithm."
        )
    flat_moments = FlatTensors([moment for _, moment in moments])
    flats = flat_moments.allocate(plain_memory)
    for flat in flats:
        replica.transport.all_reduce(flat, ReduceOp.MEAN)
    flat_moments.write(flats)


def average_known_moments(replica: Replica) -> None:
    """As `average_moments`, for all optimizers that have stepped; does nothing until every rank has taken a step."""
    optimizers = replica.optimizers
    least, most = _extremes(replica, len(optimizers))
    if least == most > 0:
        average_moments(replica, optimizers)


def _complete_moments(replica: Replica, optimizers: Sequence[Optimizer]) -> None:
    """A parameter that only other ranks have stepped on so far gets moments of zero here."""
    states = [optimizer.state for optimizer in optimizers]
    _check_as_many(replica, len(states))
    stepped = torch.tensor(
        [bool(state.get(each)) for state in states for each in replica.parameters], dtype=torch.int32
    )
    anywhere = stepped.clone()
    replica.transport.all_reduce(anywhere, ReduceOp.MAX)
    missing = iter((anywhere > stepped).tolist())
    for state in states:
        known = next(((each, state[each]) for each in replica.parameters if state.get(each)), None)
        for parameter in replica.parameters:
            if next(missing) and known is not None:
                other, moments = known
                state[parameter] = {
                    key: torch.zeros_like(parameter if value.dim() and value.shape == other.shape else value)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in moments.items()
                }


def _extremes(replica: Replica, value: int) -> tuple[int, int]:
    """The least and the largest `value` of all ranks."""
    extremes = torch.tensor([-value, value])
    replica.transport.all_reduce(extremes, ReduceOp.MAX)
    return -int(extremes[0]), int(extremes[1])


def _check_as_many(replica: Replica, num_optimizers: int) -> None:
    least, most = _extremes(replica, num_optimizers)
    if least != most:
        raise UsageError(
            f"{most} optimizers have stepped on some ranks and {least} on others, so their moments cannot be "
            "averaged. Let every optimizer step on every rank before you change the algorithm, or build new ones then."
        )


def _moments(replica: Replica, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """The floating-point state of each parameter in `optimizers`, with a name that is the same on all ranks."""
    for index, optimizer in enumerate(optimizers):
        for name, parameter in zip(replica.names, replica.parameters, strict=True):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                    yield f"{index} {name} {key} {tuple(value.shape)} {value.dtype}", value
