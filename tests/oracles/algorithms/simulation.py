"""n replicas trained in one process: what every algorithm must arrive at, in plain torch, slow and obvious.

A `Task` says what each rank computes; a `Rule` says what the replicas do to each other. A replica's `flat` is its
parameters end to end and then its floating-point buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Shard = tuple[Tensor, Tensor]


def squared_error(model: nn.Module, shard: Shard) -> Tensor:
    inputs, targets = shard
    return ((model(inputs) - targets) ** 2).mean()


@dataclass(frozen=True)
class Task:
    """What a rank computes on its own: the same code runs in the simulation and under the wrapper.

    Attributes:
        make_model: equal models on every call.
        shard: the data of (round, micro-batch, rank).
        accumulate: how many backwards a round takes; all but the last run inside `no_sync`.
        clip: the largest norm of the gradients that reach the optimizer; 0 is no limit.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    shard: Callable[[int, int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor] = squared_error
    accumulate: int = 1
    clip: float = 0.0

    def backward(
        self,
        model: nn.Module,
        round_: int,
        rank: int,
        no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Leave the gradients of a round in `model`."""
        for micro in range(self.accumulate):
            with no_sync() if micro < self.accumulate - 1 else contextlib.nullcontext():
                (self.loss(model, self.shard(round_, micro, rank)) / self.accumulate).backward()

    def limit(self, model: nn.Module) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)


def averaged(model: nn.Module) -> list[Tensor]:
    """What weight algorithms keep together: the parameters, then the buffers that have a mean."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [each.detach() for each in (*model.parameters(), *buffers)]


def flat_of(model: nn.Module) -> Tensor:
    return torch.cat([each.reshape(-1) for each in averaged(model)])


def set_flat(model: nn.Module, flat: Tensor) -> None:
    start = 0
    for each in averaged(model):
        each.copy_(flat[start : start + each.numel()].view(each.shape))
        start += each.numel()


class Replicas:
    """The models and optimizers of a simulated world.

    `round` is the number of the round under way, and `skipping` the ranks whose optimizer will not step in it.
    """

    def __init__(self, task: Task, size: int, hosts: Sequence[int] | None) -> None:
        self.size = size
        self.hosts = list(hosts) if hosts is not None else [0] * size
        self.models = [task.make_model() for _ in range(size)]
        self.optimizers = [task.make_optimizer(model.parameters()) for model in self.models]
        self.round = 0
        self.skipping: set[int] = set()

    def flats(self) -> list[Tensor]:
        """A copy of every rank's flat."""
        return [flat_of(model) for model in self.models]

    def set(self, flats: Iterable[Tensor]) -> None:
        for model, flat in zip(self.models, flats, strict=True):
            set_flat(model, flat)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.models[0].parameters())

    def members(self) -> list[list[int]]:
        """The ranks of each host; hosts in the order of their first ranks, which lead them."""
        names = list(dict.fromkeys(self.hosts))
        return [[rank for rank in range(self.size) if self.hosts[rank] == name] for name in names]

    def teams(self, hierarchical: bool) -> list[list[int]]:
        """The ranks that act as one: a host's, or each alone, as also where there is one host."""
        members = self.members()
        return members if hierarchical and len(members) > 1 else [[rank] for rank in range(self.size)]


class Rule:
    """What replicas do to each other; every moment is optional. `start` comes before the first round."""

    takes_buffers_of_rank_0 = False

    def start(self, replicas: Replicas) -> None: ...

    def before_forward(self, replicas: Replicas) -> None: ...

    def after_backward(self, replicas: Replicas) -> None: ...

    def before_step(self, replicas: Replicas) -> None: ...

    def step(self, replicas: Replicas, rank: int) -> None:
        replicas.optimizers[rank].step()

    def after_step(self, replicas: Replicas) -> None: ...


def simulate(
    rule: Rule,
    task: Task,
    size: int,
    steps: int,
    hosts: Sequence[int] | None = None,
    *,
    skips: Collection[tuple[int, int]] = (),
    begin: Callable[[nn.Module, int], None] | None = None,
) -> list[list[Tensor]]:
    """Every rank's flat after each step, by step and rank.

    `skips` holds the (round, rank) whose optimizer does not step; `begin` changes a rank's model before training.
    """
    replicas = Replicas(task, size, hosts)
    rule.start(replicas)
    for rank, model in enumerate(replicas.models):
        if begin is not None:
            begin(model, rank)
    history = []
    for number in range(steps):
        replicas.round = number
        replicas.skipping = {rank for rank in range(size) if (number, rank) in skips}
        if rule.takes_buffers_of_rank_0:
            for model in replicas.models[1:]:
                for buffer, source in zip(model.buffers(), replicas.models[0].buffers(), strict=True):
                    buffer.copy_(source)
        with torch.no_grad():
            rule.before_forward(replicas)
        for rank, model in enumerate(replicas.models):
            replicas.optimizers[rank].zero_grad()
            task.backward(model, number, rank)
        with torch.no_grad():
            rule.after_backward(replicas)
        for model in replicas.models:
            task.limit(model)
        with torch.no_grad():
            rule.before_step(replicas)
        for rank in range(size):
            if rank not in replicas.skipping:
                rule.step(replicas, rank)
        with torch.no_grad():
            rule.after_step(replicas)
        history.append(replicas.flats())
    return history


# Means and messages


def total(tensors: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, in fp32 where the dtype is a half."""
    half = tensors[0].dtype in (torch.float16, torch.bfloat16)
    result = tensors[0].float() if half else tensors[0].clone()
    for each in tensors[1:]:
        result = result + each
    return result


def mean(tensors: Sequence[Tensor], counts: Sequence[int] | None = None) -> Tensor:
    """The mean, each tensor taken `counts` times if given."""
    if counts is None or len(set(counts)) == 1:
        result = total(tensors) / len(tensors)
    else:
        result = total([each * count for each, count in zip(tensors, counts, strict=True)]) / sum(counts)
    return result.to(tensors[0].dtype)


def chunks(length: int, num_chunks: int) -> list[slice]:
    """Chunk i has length // num_chunks elements, and one more while a remainder lasts."""
    bounds, start = [], 0
    for index in range(num_chunks):
        stop = start + length // num_chunks + (1 if index < length % num_chunks else 0)
        bounds.append(slice(start, stop))
        start = stop
    return bounds


Lossy = Callable[[Tensor], Tensor]
"""What the receiver decodes of what the sender has encoded."""


def there_and_back(compressor: Any) -> Lossy:
    """A compressor as the function that its two halves make together."""

    def roundtrip(tensor: Tensor) -> Tensor:
        payload = torch.empty(compressor.payload_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8)
        out = torch.empty_like(tensor)
        compressor.compress(tensor.contiguous(), payload)
        compressor.decompress(payload, out)
        return out

    return roundtrip


class Feedback:
    """Adds what a message lost to the next one of the same stream."""

    def __init__(self, q: Lossy) -> None:
        self.q = q
        self.lost: dict[Hashable, Tensor] = {}

    def send(self, tensor: Tensor, stream: Hashable) -> Tensor:
        wanted = tensor + self.lost.get(stream, torch.zeros_like(tensor))
        decoded = self.q(wanted)
        self.lost[stream] = wanted - decoded
        return decoded


def lossy_mean(
    tensors: Sequence[Tensor], q: Lossy | Feedback, counts: Sequence[int] | None = None, subject: Hashable = None
) -> Tensor:
    """q(mean q(x)), chunk by chunk: what every one of the senders ends with. One sender sends nothing.

    With feedback, each chunk of each sender about a `subject` is a stream, and so is each chunk of the mean.
    """
    if len(tensors) == 1:
        return tensors[0].clone()
    parts = []
    for number, chunk in enumerate(chunks(tensors[0].numel(), len(tensors))):
        decoded = [_send(q, each[chunk], (subject, number, sender)) for sender, each in enumerate(tensors)]
        parts.append(_send(q, mean(decoded, counts), (subject, number, "mean")))
    return torch.cat(parts)


def _send(q: Lossy | Feedback, tensor: Tensor, stream: Hashable) -> Tensor:
    return q.send(tensor, stream) if isinstance(q, Feedback) else q(tensor.clone())
