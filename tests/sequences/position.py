"""Where a random walk through a user's actions stands: what must be known to say what is legal next."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from sequences.actions import HAZARDS, OWED, SKIP, SWITCH, Action, Choice, Forward

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
    "to_qadam",  # another one with a QAdamOptimizer, until it is changed
)
OF_QADAM = ("qadam", "qadam_sign", "qadam_topk")
OTHER_OPTIMIZERS = ("sgd", "momentum", "adam")
LOSSY = ("topk", "randomk", "sign", "uint4", "powersgd", "majority_vote")
OF_GRADIENTS = ("gradient_allreduce", "bytegrad", *LOSSY, *OF_QADAM)
BESIDE_QADAM = tuple(name for name in ALGORITHMS if name not in (*OF_GRADIENTS[1:], "to_qadam"))
"""What scripts run with a QAdamOptimizer beside QAdam itself."""


class Position:
    """The way so far, and what it makes legal next."""

    def __init__(self, seed: int, algorithm: str, hazards: Collection[str] | None) -> None:
        self.seed = seed
        self.chance = chance = random.Random(f"{algorithm} {seed}")
        drawn = chance.sample(HAZARDS, chance.choice((0, 1, 1, 1, 2, 2, 3, len(HAZARDS))))
        self.allowed = frozenset(drawn if hazards is None else hazards)
        self.num_ranks = chance.choice((2, 2, 2, 3, 4, 5))
        self.is_restless = algorithm == "to_qadam"
        self.optimizer = "qadam" if self.is_restless or algorithm in OF_QADAM else chance.choice(OTHER_OPTIMIZERS)
        if self.is_restless:
            self.allowed |= {SKIP, SWITCH}
            algorithm = chance.choice(BESIDE_QADAM)
        self.choice = self.draw_choice(algorithm)
        self.buffers = chance.choice(("", "", "norm", "mean"))
        self.warmup = chance.choice((1, 2, 3))  # of a QAdamOptimizer
        self.round = 0
        self.steps = [0] * self.num_ranks
        self.given = self.choice  # with its phases; `choice` is the one of the present phase
        if SWITCH in self.allowed and self.optimizer == "qadam" and self.is_lucky(0.5):
            self.given = self.choice = self.with_phase(self.choice)
        self.first_choice = self.given
        self.actions: list[Action] = []
        self.met: list[frozenset[str]] = []
        self.num_slots = 0
        self.live: dict[int, Forward] = {}  # losses whose backward may still run
        self.rounds_of_live = 0  # rounds since the oldest of these was computed
        self.is_open = self.is_held = False
        self.has_begun = False  # a forward of any kind has been, since the last round
        self.last_root_in_no_sync = False
        self.rounds_since_step = 0
        self.began_late = False  # the last round, in its backward
        self.is_pending = False
        self.late_is_frozen, self.spare_is_frozen = True, False
        self.saved: tuple[Choice, Choice, int, list[int]] | None = None

    def draw_choice(self, name: str) -> Choice:
        warmup = self.chance.choice((0, 0, 2)) if name == "async" else 0
        return Choice(name, self.chance.choice((1, 1, 2, 3)), warmup)

    def with_phase(self, choice: Choice) -> Choice:
        """`choice`, and another one after some rounds."""
        until = self.round + self.chance.randint(1, 4)
        return replace(choice, until=until, then=self.draw_choice(self.chance.choice(self.targets())))

    # What is known

    @property
    def is_of_weights(self) -> bool:
        if self.choice.name == "async":
            return self.round >= self.choice.warmup
        return self.choice.name not in OF_GRADIENTS

    @property
    def is_warming(self) -> bool:
        """Whether a QAdamOptimizer is in its warm-up on any rank."""
        return self.optimizer == "qadam" and min(self.steps) < self.warmup

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
        return self.saved is not None and self.saved[0] == self.given

    def targets(self) -> list[str]:
        """The algorithms that may follow."""
        if self.optimizer == "qadam":
            return list(BESIDE_QADAM if self.choice.name in OF_QADAM else OF_QADAM + BESIDE_QADAM[:1])
        return [name for name in ALGORITHMS[:-1] if name not in OF_QADAM]

    @property
    def is_phase_due(self) -> bool:
        return self.choice is self.given and self.given.then is not None and self.round >= self.given.until

    @property
    def can_thaw(self) -> bool:
        return self.late_is_frozen and (self.optimizer != "qadam" or max(self.steps) < self.warmup)

    @property
    def can_join(self) -> bool:
        """A join of an asynchronous average may leave its warm-up."""
        is_last = self.choice is not self.given or self.given.then is None
        can_settle = self.can_meet and (self.choice.name != "async" or OWED in self.allowed)
        return can_settle and is_last and not self.is_warming
