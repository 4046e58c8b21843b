"""What a user may do with a wrapped model, as plain data: a script is drawn from a seed and read by both sides.

One side is the library (`rank`), the other a simulation in one process (`simulation`). The model, its data and its
losses are the same for both; nothing here knows of the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddp.models import fill, values

WIDTH = 4
LEARNING_RATE = 0.05

# What earlier versions of the library got wrong, as far as a script can show it: an action is marked with these, so
# that a failure can be told from others.
SKIP = "a skipped step"
BY_HAND = "weights changed by hand"
NO_ROOT = "no training forward of the root"
JOIN = "several synchronised backwards in join"
LIVE = "several backwards on live graphs"
MIXED = "no_sync around forward or backward alone"
THAW = "a thawed parameter"
LOAD = "other weights loaded"
SWITCH = "another algorithm"
RESUME = "a new wrapper resumes"
OWED = "a collective before the step"
HAZARDS = (SKIP, BY_HAND, NO_ROOT, JOIN, LIVE, MIXED, THAW, LOAD, SWITCH, RESUME, OWED)


@dataclass(frozen=True)
class Choice:
    """An algorithm by name, and what it is told; from round `until` on, `then` is run in its place, if there is one."""

    name: str
    interval: int = 1
    warmup: int = 0
    until: int = 0
    then: Choice | None = None


@dataclass(frozen=True)
class Forward:
    """A loss under `slot`; `kind` says what computes it, `spare` which ranks use the part that is not always used."""

    slot: int
    kind: str  # "ddp", "module", "part", "method" or "raw"
    in_eval: bool
    in_no_sync: bool
    spare: tuple[bool, ...]

    @property
    def is_root(self) -> bool:
        return self.kind in ("ddp", "module")


@dataclass(frozen=True)
class Backward:
    """Backward of the sum of some losses; on the `spoiled` ranks it is NaN."""

    slots: tuple[int, ...]
    retain: bool
    in_no_sync: bool
    spoiled: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sync:
    overlapped: bool


@dataclass(frozen=True)
class Step:
    """A step of the optimizer, on all ranks but those that skip it: they do not call it, or a GradScaler says so."""

    skipping: tuple[int, ...] = ()
    is_scaled: bool = False


@dataclass(frozen=True)
class ZeroGrad:
    to_none: bool


@dataclass(frozen=True)
class ByHand:
    """A change of the weights without an optimizer: "descend" along the gradients, or "perturb"."""

    kind: str
    alike: bool  # whether all ranks do the same


@dataclass(frozen=True)
class Evaluate:
    """Forwards that record no graph."""


@dataclass(frozen=True)
class Collect:
    """A collective operation of the user's own, or one of the wrapper's that look at the replicas."""

    kind: str


@dataclass(frozen=True)
class Save:
    step: int


@dataclass(frozen=True)
class Load:
    """The last checkpoint, into the wrapper that is there."""


@dataclass(frozen=True)
class Resume:
    """The last checkpoint, into a new model, wrapper and optimizer; the old wrapper is closed."""


@dataclass(frozen=True)
class LoadWeights:
    """Weights from elsewhere, the same on all ranks; through "ddp", the "module", or "broadcast" from the last rank."""

    through: str
    seed: int


@dataclass(frozen=True)
class Switch:
    choice: Choice


@dataclass(frozen=True)
class Freeze:
    part: str


@dataclass(frozen=True)
class Thaw:
    part: str


@dataclass(frozen=True)
class Join:
    """An epoch over uneven data: `backwards` of each batch, and a step after every `every` batches."""

    lengths: tuple[int, ...]
    backwards: int
    every: int
    first: int  # a slot that no forward of the script has


@dataclass(frozen=True)
class Close:
    """The end of every script."""


Action = (
    Forward
    | Backward
    | Sync
    | Step
    | ZeroGrad
    | ByHand
    | Evaluate
    | Collect
    | Save
    | Load
    | Resume
    | LoadWeights
    | Switch
    | Freeze
    | Thaw
    | Join
    | Close
)


@dataclass(frozen=True)
class Script:
    """What all ranks do. `hazards[i]` are those met when action i has been done."""

    seed: int
    num_ranks: int
    choice: Choice
    buffers: str  # "", "norm" for BatchNorm, or "mean" for a running mean
    optimizer: str  # "sgd", "momentum", "adam" or "qadam"
    actions: tuple[Action, ...]
    hazards: tuple[frozenset[str], ...]
    warmup: int = 1  # steps of "qadam"

    def told(self, failed_at: int | None = None) -> str:
        """The script as lines, the action that failed marked."""
        optimizer = f"{self.optimizer} with {self.warmup=}" if self.optimizer == "qadam" else self.optimizer
        head = f"seed {self.seed}: {self.num_ranks} ranks, {self.choice}, {optimizer}, buffers {self.buffers!r}"
        lines = [f"{'>>' if at == failed_at else '  '} {at:2} {each}" for at, each in enumerate(self.actions)]
        return "\n".join([head, *lines])


class Net(nn.Module):
    """Two parts, a method that calls them, a part that is not always used, a bare parameter, and a frozen part."""

    def __init__(self, buffers: str, late_is_frozen: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.stem = nn.Linear(3, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if buffers == "norm" else nn.Identity()
        self.head = nn.Linear(WIDTH, 2)
        self.spare = nn.Linear(WIDTH, 2)
        self.late = nn.Linear(3, 2).requires_grad_(not late_is_frozen)
        if buffers == "mean":
            self.register_buffer("running", torch.zeros(WIDTH))
        self.buffers_kind = buffers

    def forward(self, x: Tensor, spare: bool = False) -> Tensor:
        hidden = self.norm(torch.tanh(self.stem(x))) * self.scale  # BatchNorm alone would cancel the bias
        if self.buffers_kind == "mean":
            if self.training:
                with torch.no_grad():
                    self.running.mul_(0.75).add_(hidden.mean(0), alpha=0.25)
            hidden = hidden + self.running.clone()
        hidden = torch.tanh(hidden)
        out: Tensor = self.head(hidden) + self.late(x)
        return out + self.spare(hidden) if spare else out

    def encode(self, x: Tensor) -> Tensor:
        """What a user calls by name, past `forward`."""
        out: Tensor = self.head(torch.tanh(self.stem(x)))
        return out


def make_model(buffers: str, seed: int, late_is_frozen: bool = True) -> Net:
    return fill(Net(buffers, late_is_frozen).double(), seed)


def batch_of(seed: int, slot: int, rank: int) -> tuple[Tensor, Tensor]:
    """What `rank` computes the loss of `slot` on."""
    number = 100_000 * seed + 10 * slot + rank
    return values(3, 3, seed=number, dtype=torch.float64), values(3, 2, seed=number + 7, dtype=torch.float64) + rank


def loss_of(root: nn.Module, module: Net, kind: str, spare: bool, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a forward; `root` is called for "ddp"."""
    match kind:
        case "ddp":
            return (root(x, spare) - y).square().mean()
        case "module":
            return (module(x, spare) - y).square().mean()
        case "part":
            return module.stem(x).square().mean() + module.head(y.repeat(1, 2)).square().mean()
        case "method":
            return (module.encode(x) - y).square().mean()
        case "raw":
            return ((x @ module.stem.weight.T * module.scale).tanh() @ module.head.weight.T - y).square().mean()
    raise AssertionError(kind)


@torch.no_grad()
def change_by_hand(module: Net, action: ByHand, seed: int, at: int, rank: int) -> None:
    for number, parameter in enumerate(module.parameters()):
        if action.kind == "descend" and parameter.grad is not None:
            parameter -= LEARNING_RATE * parameter.grad
        elif action.kind == "perturb" and parameter.requires_grad:
            source = 1000 * seed + 10 * at + 5 + (0 if action.alike else 100_000 * (rank + 1)) + 7 * number
            parameter.data.add_(values(*parameter.shape, seed=source, dtype=torch.float64), alpha=0.1)


def floats(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and floating-point buffers by name."""
    named = [(name, each.detach()) for name, each in module.named_parameters()]
    return named + [(name, each) for name, each in module.named_buffers() if each.is_floating_point()]


def row_of(module: nn.Module, results: Sequence[float]) -> Tensor:
    """All that is compared after an action: weights and buffers, gradients (nan is none), and what a call returned."""
    parts = [each.reshape(-1) for _, each in floats(module)]
    for parameter in module.parameters():
        gradient = torch.full_like(parameter, torch.nan) if parameter.grad is None else parameter.grad
        parts.append(gradient.detach().reshape(-1))
    padded = [*results, 0.0, 0.0, 0.0][:3]
    return torch.cat([*parts, torch.tensor(padded, dtype=torch.float64)])


def columns(module: nn.Module) -> list[str]:
    """What each element of a row is."""
    names = [name for name, each in floats(module) for _ in range(each.numel())]
    names += [f"gradient of {name}" for name, each in module.named_parameters() for _ in range(each.numel())]
    return [*names, "result", "result", "result"]
