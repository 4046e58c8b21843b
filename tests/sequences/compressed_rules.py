"""What each algorithm of few bytes owes its replicas, and over directed graphs: see `rules`.

A step that is skipped leaves nothing: when a forward or a backward of the root finds nothing left of the gradients of
the last round, without a step, what messages lost since counts as it did before. So it does for a parameter that no
rank used, whose gradient stays None. A draw at random is not taken back. What messages lost stays with its parameter
when gradients travel in another order; the draws then begin anew.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from murmura import Compressor
from oracles.algorithms.powersgd import drawn
from oracles.algorithms.simulation import chunks, there_and_back
from sequences.algorithms import inner_of, options_of, topology_of
from sequences.rules import (
    AfterStep,
    DiLoCo,
    MeanGradients,
    Rule,
    Waiting,
    Weights,
    mean_of,
    mixed_over,
)

Shares = dict[str, Tensor]


class Undetermined(Exception):
    """What follows depends on rounding errors: the library is not wrong if it comes to something else."""


def encoder(name: str, number: int) -> Compressor:
    compressor = inner_of(name)
    if name == "randomk":
        compressor.load_state_dict({"number": number})
    return compressor


def arrives(name: str, values: Tensor, number: int) -> Tensor:
    """What is decoded of `values`; `Undetermined` if rounding errors decide it: half-way between codes, or in a tie."""
    decoded = there_and_back(encoder(name, number))(values)
    random = torch.Generator().manual_seed(0)
    noise = 1e-13 * torch.randn(values.numel(), generator=random, dtype=values.dtype) * (values != 0)
    for shift in (noise, -noise):
        other = there_and_back(encoder(name, number))(values + shift)
        if not torch.allclose(other, decoded, rtol=0, atol=1e-10):
            raise Undetermined
    return decoded


def lossy_mean(
    name: str, values: Sequence[Tensor], lost: Sequence[Tensor], lost_of_mean: Tensor, number: int = 0, decay: float = 1
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The mean that all ranks decode of `values`, what each of them has lost now, and what the mean has lost."""
    corrected = [value + decay * each for value, each in zip(values, lost, strict=True)]
    size, gathers = len(values), inner_of(name).gathers
    now, mean, of_mean = [each.clone() for each in corrected], torch.zeros_like(values[0]), lost_of_mean.clone()
    for chunk in chunks(values[0].numel(), 1 if gathers else size):
        total = torch.zeros_like(mean[chunk])
        for rank in range(size):
            decoded = arrives(name, corrected[rank][chunk], number)
            now[rank][chunk] -= decoded
            total += decoded
        mean[chunk] = total / size
        if not gathers:
            wanted = mean[chunk] + lost_of_mean[chunk]
            mean[chunk] = arrives(name, wanted, number)
            of_mean[chunk] = wanted - mean[chunk]
    return mean, now, of_mean


def mixed(now: Mapping[str, Tensor] | set[str], before: Mapping[str, Tensor] | set[str], names: set[str]) -> object:
    """`before` for `names`, and `now` for the others."""
    if isinstance(now, set):
        return (now - names) | (set(before) & names)
    others = {name: each for name, each in now.items() if name not in names}
    return others | {name: before[name] for name in names if name in before}  # type: ignore[index]


class LossyGradients(MeanGradients):
    """What skipped steps leave, and how means become gradients, where they are not plain means."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.before: object = None  # what to take back if the step is skipped
        self.num_rounds = 0  # since the step

    def snapshot(self) -> object:
        """What messages lost; nothing where nothing is kept of it."""
        return ()

    def take_back(self, snapshot: object) -> None:
        return

    def take_back_of(self, names: set[str]) -> None:
        """Take back what `before` holds of the parameters `names`."""
        if self.before is None:
            return
        now = copy.deepcopy(self.snapshot())
        self.take_back(self.before)
        was = self.snapshot()
        self.take_back(tuple(mixed(new, old, names) for new, old in zip(now, was, strict=True)))  # type: ignore[call-overload]

    def mean(self, everyone: list[Shares], used: set[str]) -> Waiting:
        """Returns the mean by name of what ranks bring."""
        raise NotImplementedError

    def look(self) -> None:
        gradients = [each.grad for each in self.rank.model.parameters() if each.grad is not None]
        if self.num_rounds and not any(bool(each.any()) for each in gradients):
            if self.before is not None:
                self.take_back(self.before)
            self.before, self.num_rounds = None, 0

    def before_step(self) -> Waiting:
        self.before, self.num_rounds = None, 0
        yield from ()

    def end(self) -> Waiting:
        rank, size = self.rank, self.rank.board.size
        mine = {name: None if each.grad is None else each.grad.clone() for name, each in rank.included()}
        everyone = yield from rank.exchange("gradients", (rank.weight, mine, dict(rank.own_gradients)))
        used = {name for _, theirs, _ in everyone for name, each in theirs.items() if each is not None}
        zeros = {name: torch.zeros_like(each) for name, each in rank.included()}
        weight = sum(weight for weight, *_ in everyone) / size
        whole = []
        for _, theirs, new in everyone:  # ranks without data bring zeros; what earlier rounds left is a mean already
            own = {name: zeros[name] if each is None else each for name, each in theirs.items()}
            if weight not in (0.0, 1.0):
                recent = {name: zeros[name] if theirs[name] is None else new.get(name, zeros[name]) for name in own}
                own = {name: recent[name] / weight + (each - recent[name]) for name, each in own.items()}
            whole.append(own)
        means: Shares = yield from self.mean(whole, used)
        self.take_back_of({name for name, _ in rank.included()} - used)
        for name, parameter in rank.included():
            if name in used:
                parameter.grad = means[name].clone()
        self.num_rounds += 1


class Compressed(LossyGradients):
    """g <- q(mean q(g + e)), or mean q(g + e) where payloads are gathered, in the order in which gradients travel."""

    kept = ("before", "num_rounds", "lost", "lost_of_mean", "names", "number")

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.lost: Shares = {}
        self.lost_of_mean: Shares = {}
        self.names: tuple[str, ...] = ()
        self.number = 0

    def snapshot(self) -> object:
        return dict(self.lost), dict(self.lost_of_mean)

    def take_back(self, snapshot: object) -> None:
        self.lost, self.lost_of_mean = copy.deepcopy(snapshot)  # type: ignore[misc]

    def mean(self, everyone: list[Shares], used: set[str]) -> Waiting:
        names, name = self.rank.next_layout(), self.choice.name
        if names != self.names:
            self.names, self.number = names, 0
        if self.before is None:
            self.before = self.snapshot()
        numels = [everyone[0][each].numel() for each in names]
        lost = yield from self.rank.exchange("lost", flat_of(self.lost, everyone[0], names))
        mean, now, of_mean = lossy_mean(
            name,
            [flat_of(each, each, names) for each in everyone],
            lost,
            flat_of(self.lost_of_mean, everyone[0], names),
            self.number,
        )
        self.number += 1
        self.lost = dict(zip(names, now[self.rank.number].split(numels), strict=True))
        self.lost_of_mean = dict(zip(names, of_mean.split(numels), strict=True))
        parts = zip(names, mean.split(numels), strict=True)
        return {each: part.view_as(everyone[0][each]) for each, part in parts}


def flat_of(values: Mapping[str, Tensor], like: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """`values` end to end, zeros where there is none."""
    return torch.cat([values.get(name, torch.zeros_like(like[name])).reshape(-1) for name in names])


class PowerSGD(LossyGradients):
    """M <- g + e; P = mean M Q, normed; Q = mean M^T P; g <- P Q^T; e <- M - P Q^T; of rank one.

    Without a warm start each round draws its Q; in warm-up rounds gradients are averaged as they are.
    A parameter without gradients but zeros sends its errors until their mean is zero but for rounding errors, and so is
    Q then.
    """

    kept = ("before", "num_rounds", "errors", "factors", "noise")

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.errors: Shares = {}
        self.factors: Shares = {}
        self.noise: set[str] = set()  # whose factor is of rounding errors

    def snapshot(self) -> object:
        return dict(self.errors), dict(self.factors), set(self.noise)

    def take_back(self, snapshot: object) -> None:
        self.errors, self.factors, self.noise = copy.deepcopy(snapshot)  # type: ignore[misc]

    def mean(self, everyone: list[Shares], used: set[str]) -> Waiting:
        size, means = len(everyone), {}
        options = options_of(self.choice)
        if self.rank.round < options.get("warmup_rounds", 0):
            return mean_of(everyone)
        is_warm = options.get("warm_start", True)
        if self.before is None:
            self.before = self.snapshot()
        errors = yield from self.rank.exchange("lost", dict(self.errors))
        for name, first in everyone[0].items():
            height, width = first.shape[0], first[0].numel()
            if height + width >= height * width:
                means[name] = sum(each[name] for each in everyone) / size
                continue
            matrices = [own[name] + lost.get(name, 0) for own, lost in zip(everyone, errors, strict=True)]
            factor = normed(self.factors.get(name, drawn(name, width, 1, 0 if is_warm else self.rank.round)))
            p = normed(sum(m @ factor for m in matrices) / size)  # type: ignore[arg-type]
            q = sum(m.T @ p for m in matrices) / size
            means[name] = p @ q.T  # type: ignore[union-attr]
            is_noise = 0 < q.norm() < 1e-10 * max(m.norm() for m in matrices)  # type: ignore[union-attr]
            if name in self.noise and not is_noise:
                raise Undetermined
            self.noise = self.noise | {name} if is_noise else self.noise - {name}
            if is_warm:
                self.factors[name] = q if bool((q != 0).any()) else factor  # type: ignore[union-attr, assignment]
            self.errors[name] = matrices[self.rank.number] - means[name]
        return means


def normed(column: Tensor) -> Tensor:
    norm = column.norm()
    return column / norm if norm > 0 else torch.eye(len(column), dtype=column.dtype)[:, :1]


class PushSum(AfterStep):
    """The step moves x as it moves z = x / w; then x <- P x, w <- P w. The number of an exchange goes on counting."""

    kept = ("x", "w", "num_exchanges")
    num_exchanges = 0

    def begin(self) -> None:
        super().begin()
        self.x = self.rank.weights()
        self.w = [1.0] * self.rank.board.size

    @property
    def weight_in_mean(self) -> float:
        return self.w[self.rank.number]

    def take_in(self, names: list[str]) -> None:
        now = self.rank.weights()
        self.x.update({name: self.weight_in_mean * now[name] for name in names})

    def is_due(self, number: int) -> bool:
        return True

    def communicate(self) -> Waiting:
        number, size = self.rank.number, len(self.w)
        z = self.rank.weights()
        x = {name: self.x[name] + (z[name] - self.x[name] / self.weight_in_mean) for name in self.x}
        everyone = yield from self.rank.exchange("weights", x)
        topology, weights = (
            topology_of(self.choice),
            [{"w": torch.tensor(each, dtype=torch.float64)} for each in self.w],
        )
        self.x = mixed_over(topology, everyone, number, self.num_exchanges)
        mixed = [mixed_over(topology, weights, rank, self.num_exchanges) for rank in range(size)]
        self.w = [each["w"].item() for each in mixed]
        self.num_exchanges += 1
        self.rank.write({name: each / self.weight_in_mean for name, each in self.x.items()})


class SparseLoCo(DiLoCo):
    """m <- 0.95 m + (theta - x); each sends q(m), which leaves m; theta and x <- theta - mean of what was sent."""

    kept = ("theta", "velocity", "lost")

    def begin(self) -> None:
        super().begin()
        self.lost: Weights = {}

    def communicate(self) -> Waiting:
        self.theta = yield from self.start_from_mean(self.theta)
        x = self.rank.weights()
        names = [name for name in x if name in self.theta]
        changes = {name: self.theta[name] - x[name] for name in names}
        buffers = {name: each for name, each in x.items() if name not in self.theta}
        mine = (flat_of(changes, x, names), flat_of(self.lost, x, names), buffers)
        everyone = yield from self.rank.exchange("weights", mine)
        values, lost = [each[0] for each in everyone], [each[1] for each in everyone]
        mean, now, _ = lossy_mean("sparse_loco", values, lost, torch.zeros_like(values[0]), decay=0.95)
        numels = [x[name].numel() for name in names]
        self.lost = dict(zip(names, now[self.rank.number].split(numels), strict=True))
        new = {name: sum(each[2][name] for each in everyone) / len(everyone) for name in buffers}
        for name, part in zip(names, mean.split(numels), strict=True):
            self.theta[name] = self.theta[name] - part.view_as(x[name])
            new[name] = self.theta[name].clone()
        self.rank.write(new)


FEW_BYTES: dict[str, type[Rule]] = {
    **dict.fromkeys(("topk", "randomk", "sign", "uint4"), Compressed),
    "powersgd": PowerSGD,
    "push_sum": PushSum,
    "sparse_loco": SparseLoCo,
}
