"""Where a random walk through a user's actions stands: what must be known to say what is legal next."""

from __future__ import annotations

import random
from collections.abc import Collection

from sequences.actions import HAZARDS, OWED, Action, Choice, Forward

ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "shift_one",
    "low_precision_decentralized",
    "qadam",
    "async",
    "local_sgd",
    "diloco",
    "topk",
    "randomk",
    "sign",
    "uint4",
    "powersgd",
    "push_sum",
    "sparse_loco",
    "qadam_sign",
    "majority_vote",
    "average_moments",
    "streaming_diloco",
    "streaming_uint4",
    "qadam_topk",
    "exponential",
    "random_matching",
)
OF_QADAM = ("qadam", "qadam_sign", "qadam_topk")
LOSSY = ("topk", "randomk", "sign", "uint4", "powersgd", "majority_vote")
OF_GRADIENTS = ("gradient_allreduce", "bytegrad", *LOSSY, *OF_QADAM)


class Position:
    """The way so far, and what it makes legal next."""

    def __init__(self, seed: int, algorithm: str, hazards: Collection[str] | None) -> None:
        self.seed = seed
        self.chance = chance = random.Random(f"{algorithm} {seed}")
        drawn = chance.sample(HAZARDS, chance.choice((0, 1, 1, 1, 2, 2, 3, len(HAZARDS))))
        self.allowed = frozenset(drawn if hazards is None else hazards)
        self.num_ranks = chance.choice((2, 2, 2, 3, 4))
        self.first_choice = self.choice = self.draw_choice(algorithm)
        self.buffers = chance.choice(("", "", "norm", "mean"))
        self.optimizer = "qadam" if algorithm in OF_QADAM else chance.choice(("sgd", "momentum", "adam"))
        self.actions: list[Action] = []
        self.met: list[frozenset[str]] = []
        self.num_slots = 0
        self.live: dict[int, Forward] = {}  # losses whose backward may still run
        self.rounds_of_live = 0  # rounds since the oldest of these was computed
        self.round = 0
        self.is_open = self.is_held = False
        self.has_begun = False  # a forward of any kind has been, since the last round
        self.last_root_in_no_sync = False
        self.rounds_since_step = 0
        self.num_steps = 0
        self.stepped: set[int] = set()
        self.is_pending = False
        self.late_is_frozen, self.spare_is_frozen = True, False
        self.saved: tuple[Choice, int, int] | None = None

    def draw_choice(self, name: str) -> Choice:
        chance = self.chance
        warmup = chance.choice((1, 2, 3)) if name in OF_QADAM else chance.choice((0, 0, 2)) if name == "async" else 0
        return Choice(name, chance.choice((1, 1, 2, 3)), warmup)

    # What is known

    @property
    def is_of_weights(self) -> bool:
        if self.choice.name == "async":
            return self.round >= self.choice.warmup
        return self.choice.name not in OF_GRADIENTS

    @property
    def is_warming(self) -> bool:
        return self.optimizer == "qadam" and self.num_steps < self.first_choice.warmup

    @property
    def is_between(self) -> bool:
        """Whether no round is under way, in whatever sense: no graph was recorded and no gradient is held back."""
        return not self.has_begun and not self.is_held

    def use(self, hazard: str) -> None:
        self.using.add(hazard)

    def add(self, action: Action) -> None:
        self.actions.append(action)

    def is_lucky(self, probability: float) -> bool:
        return self.chance.random() < probability

    @property
    def waits_for_step(self) -> bool:
        """Whether weights will be written that no step has been skipped for."""
        is_pending = self.rounds_since_step > 0 or self.choice.name == "async"
        return self.is_of_weights and not self.is_open and is_pending

    @property
    def can_meet(self) -> bool:
        return OWED in self.allowed or not self.waits_for_step

    def meet(self) -> None:
        if self.waits_for_step:
            self.use(OWED)

    @property
    def can_load(self) -> bool:
        return self.saved is not None and self.saved[0] == self.choice

    def targets(self) -> list[str]:
        """The algorithms that may follow."""
        if self.optimizer == "qadam":
            return ["gradient_allreduce"] if self.choice.name in OF_QADAM else [self.first_choice.name]
        names = [name for name in ALGORITHMS if name not in OF_QADAM]
        if 0 < len(self.stepped) < self.num_ranks:
            names = [name for name in names if name not in OF_GRADIENTS]  # some ranks have no moments yet
        return names

    @property
    def can_thaw(self) -> bool:
        return self.late_is_frozen and (self.optimizer != "qadam" or self.is_warming)

    @property
    def can_join(self) -> bool:
        """A join of an asynchronous average may leave its warm-up."""
        return self.can_meet and not self.is_warming and (self.choice.name != "async" or OWED in self.allowed)
