"""From one running algorithm to another on a live model."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Replica
from murmura.algorithms.qadam_optimizer import QAdamOptimizer
from murmura.algorithms.weights import FlatWeights
from murmura.buckets.flat import FlatTensors, plain_memory
from murmura.collectives.deadline import Deadline
from murmura.errors import UsageError
from murmura.transports.objects import all_gather_json
from murmura.types import Exchanges, ReduceOp


def replace_algorithm(running: AlgorithmImpl, algorithm: Algorithm, replica: Replica) -> AlgorithmImpl:
    """Close `running` and return what runs `algorithm`, not yet set up. Collective, between rounds.

    Replicas that `running` let differ start again from the mean of their weights and of their optimizers' moments;
    moments of optimizers that not every rank knows yet are averaged at their next step. What is frozen now takes part
    no more. If `algorithm` is refused, `running` goes on.
    """
    successor = algorithm.reify(replica.transport)
    averages_moments = running.exchanges is Exchanges.WEIGHTS and successor.exchanges is not Exchanges.WEIGHTS
    if averages_moments and (optimizers := _known_everywhere(replica)):
        _agreed_moments(replica, optimizers)  # may refuse, so it comes before anything changes
    running.settle()
    whole = Deadline(replica.transport.timeout)
    running.close()  # a loop that averages by the clock waits here for the others' votes
    if running.exchanges is Exchanges.WEIGHTS:
        _average_weights(replica, running.weight_in_mean, max(whole.remaining, whole.timeout / 2))
        replica.moments_may_differ = True
    if successor.exchanges is Exchanges.WEIGHTS:
        replica.moments_may_differ = False
    elif replica.moments_may_differ and not average_known_moments(replica):
        replica.forget_optimizers()  # a rank that skipped its only step knows none: at the next step all average
    replica.moments_pending = False
    parameters = zip(replica.names, replica.parameters, strict=True)
    replica.trained = {name for name, parameter in parameters if parameter.requires_grad}
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
def average_moments(replica: Replica, optimizers: Sequence[Optimizer], *, unless_equal: bool = False) -> None:
    """Average the moments of `optimizers`, and the numbers beside them, as of steps, which need not be whole then.

    With different moments, equal weights would drift apart again. `unless_equal` leaves them alone where all ranks hold
    the same bits, which a mean of three would round.
    """
    ordered = _in_common_order(replica, optimizers)
    try:
        _check_same_optimizers(replica, ordered)
        moments, numbers = _agreed_moments(replica, ordered)
    except UsageError:
        replica.forget_optimizers()  # a program that goes on is refused again: it would step on what differs
        raise
    for optimizer in ordered:
        if isinstance(optimizer, QAdamOptimizer):
            optimizer.take_fewest_steps(replica.transport)
    counts = torch.tensor([state[key] for state, key in numbers], dtype=torch.float64)
    moments += [counts] if numbers else []
    if unless_equal and _is_same_everywhere(replica, " ".join(map(_digest, moments))):
        return
    flat_moments = FlatTensors(moments)
    flats = flat_moments.allocate(plain_memory)
    for flat in flats:
        replica.transport.all_reduce(flat, ReduceOp.MEAN)
    flat_moments.write(flats)
    for (state, key), mean in zip(numbers, counts.tolist(), strict=True):
        state[key] = type(state[key])(mean) if mean.is_integer() else mean


def average_known_moments(replica: Replica) -> bool:
    """As `average_moments`, for all optimizers that are known; does nothing unless every rank knows the same.

    Returns whether it has averaged, which is the same on all ranks.
    """
    optimizers = _known_everywhere(replica)
    if optimizers:
        average_moments(replica, optimizers)
    return bool(optimizers)


def _known_everywhere(replica: Replica) -> list[Optimizer]:
    """The optimizers that are known, in common order; none unless every rank knows the same. Collective."""
    ordered = _in_common_order(replica, replica.optimizers)
    return ordered if _is_same_everywhere(replica, _description(replica, ordered)) else []


def _in_common_order(replica: Replica, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """`optimizers` by the parameters that they hold: a rank that skips a step gets to know them in another order."""
    return sorted(optimizers, key=lambda each: (_held(replica, each), type(each).__name__))


def _held(replica: Replica, optimizer: Optimizer) -> list[int]:
    """The indices of the parameters that `optimizer` steps on."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [index for index, parameter in enumerate(replica.parameters) if id(parameter) in held]


def _description(replica: Replica, optimizers: Sequence[Optimizer]) -> str:
    return "; ".join(f"{type(each).__name__} {_held(replica, each)}" for each in optimizers)


def _check_same_optimizers(replica: Replica, optimizers: Sequence[Optimizer]) -> None:
    if not _is_same_everywhere(replica, _description(replica, optimizers)):
        names = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise UsageError(
            f"the moments that rank {replica.transport.reporter.own} is to average since the algorithm was changed are "
            f"those of another optimizer ({names}) than on other ranks. Let the same optimizers step on every rank, in "
            "the same order, or build new ones when you change the algorithm."
        )


def _agreed_moments(
    replica: Replica, optimizers: Sequence[Optimizer]
) -> tuple[list[Tensor], list[tuple[dict[str, Any], str]]]:
    """The moments of `optimizers`, and where their numbers are, of the same form on all ranks; otherwise an error.

    A rank without state for a parameter is given some, but keeps none after an error.
    """
    completed = _complete_moments(replica, optimizers)
    moments, numbers = list(_moments(replica, optimizers)), list(_numbers(replica, optimizers))
    texts = [name for name, _ in moments] + [name for name, _, _ in numbers]
    texts += [f"{at} {key} {_digest(value)}" for _, at, key, value in _found_without_mean(replica, optimizers)]
    if not _is_same_everywhere(replica, "; ".join(texts)):
        error = _without_mean(replica, optimizers)
        for state, parameter in completed:
            del state[parameter]
        raise error
    return [moment for _, moment in moments], [(state, key) for _, state, key in numbers]


def _found_without_mean(replica: Replica, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, int, str, Any]]:
    """What has no mean, as whole numbers in a tensor, and for which of an optimizer's parameters it is kept.

    Lists count also where the parameter is ignored, as LBFGS keeps them for one only.
    """
    kept = {id(parameter) for parameter in replica.parameters}
    for optimizer in optimizers:
        for at, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                is_ours = id(parameter) in kept or isinstance(value, list)
                if is_ours and not _is_moment(value) and not _is_number(value):
                    yield optimizer, at, key, value


def _without_mean(replica: Replica, optimizers: Sequence[Optimizer]) -> UsageError:
    """The error that the ranks' optimizers hold what cannot be averaged."""
    for optimizer, _, key, value in _found_without_mean(replica, optimizers):
        name = type(optimizer).__name__
        kind = f"{value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        return UsageError(
            f"{name} keeps {key!r}, a {kind}, and such state has no mean where it differs between the ranks: equal "
            f"weights would drift apart again. Delete this {name}, change the algorithm, and build a new one; leave "
            "average_moments out."
        )
    return UsageError(
        "the ranks' optimizers do not hold the same moments, so they cannot be averaged. Build the same optimizers "
        "on every rank, or new ones before you change the algorithm."
    )


def _complete_moments(
    replica: Replica, optimizers: Sequence[Optimizer]
) -> list[tuple[dict[Tensor, Any], nn.Parameter]]:
    """Give parameters that only other ranks have stepped on so far moments of zero here; return which."""
    states: list[tuple[dict[Tensor, Any], nn.Parameter]]
    states = [(optimizer.state, parameter) for optimizer in optimizers for parameter in replica.parameters]
    is_here = torch.tensor([bool(state.get(parameter)) for state, parameter in states], dtype=torch.int32)
    extremes = torch.stack([is_here, 1 - is_here])
    replica.transport.all_reduce(extremes, ReduceOp.MAX)
    on_some = [str(index) for index in extremes.prod(0).nonzero().view(-1).tolist()]  # and not on others
    if not on_some:
        return []
    # By shapes of its own a rank cannot tell a moment from a number of steps, if it has stepped on scalars only.
    own = {each: _forms(state.get(parameter, {})) for each in on_some for state, parameter in [states[int(each)]]}
    of_all = all_gather_json(replica.transport, own)
    completed = []
    for each in on_some:
        state, parameter = states[int(each)]
        if not state.get(parameter):
            completed.append((state, parameter))
            forms: dict[str, Any] = next((forms[each] for forms in of_all if forms[each]), {})
            state[parameter] = {key: _zeros(form, parameter) for key, form in forms.items()}
    return completed


def _forms(moments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a tensor in `moments` the shape, dtype and kind of device, 0 for a number, others if JSON can hold them."""
    forms: dict[str, Any] = {}
    for key, value in moments.items():
        if isinstance(value, Tensor):
            forms[key] = list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type
        elif _is_number(value):
            forms[key] = 0 if isinstance(value, Integral) else 0.0
        elif isinstance(value, str | bool | None):
            forms[key] = value
    return forms


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _zeros(form: Any, parameter: nn.Parameter) -> Any:
    """What a moment of `parameter` is before the first step, given its form on another rank."""
    if not isinstance(form, list):
        return form
    shape, dtype, kind = form
    device = parameter.device if kind == parameter.device.type else torch.device(kind)
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def _digest(value: Any) -> str:
    """What tells `value` apart, but for an object of which only the type is known."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}: {_digest(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_digest, value))
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, Real | str | None) else type(value).__name__
    raw: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return str(zlib.crc32(raw))


def _is_same_everywhere(replica: Replica, text: str) -> bool:
    """Whether all ranks have the same `text`."""
    fingerprint = zlib.crc32(text.encode())
    extremes = torch.tensor([-fingerprint, fingerprint])
    replica.transport.all_reduce(extremes, ReduceOp.MAX)
    return -int(extremes[0]) == int(extremes[1])


def _moments(replica: Replica, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """The floating-point state of each parameter in `optimizers`, with a name that is the same on all ranks."""
    for index, optimizer in enumerate(optimizers):
        for name, parameter in zip(replica.names, replica.parameters, strict=True):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if _is_moment(value):
                    yield f"{index} {name} {key} {tuple(value.shape)} {value.dtype}", value


def _numbers(replica: Replica, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where a number that is no tensor is kept for a parameter: its state, and the key, behind a name as of moments."""
    for index, optimizer in enumerate(optimizers):
        for name, parameter in zip(replica.names, replica.parameters, strict=True):
            state = optimizer.state.get(parameter, {})
            for key in sorted(key for key, value in state.items() if _is_number(value)):
                yield f"{index} {name} {key}", state, key
