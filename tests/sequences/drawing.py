"""Random legal scripts: a walk through what a user may do next, from a seed alone.

A script uses only some of the hazards, so that most failures have one cause to look for; some use none, some all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from sequences.actions import (
    BY_HAND,
    JOIN,
    LIVE,
    LOAD,
    MIXED,
    NO_ROOT,
    OWED,
    RESUME,
    SKIP,
    SWITCH,
    THAW,
    Backward,
    ByHand,
    Choice,
    Close,
    Collect,
    Evaluate,
    Forward,
    Freeze,
    Join,
    Load,
    LoadWeights,
    Resume,
    Save,
    Script,
    Step,
    Switch,
    Sync,
    Thaw,
    ZeroGrad,
)
from sequences.position import OF_GRADIENTS, OF_QADAM, Position


def draw_script(seed: int, algorithm: str, hazards: Collection[str] | None = None) -> Script:
    """The script of a seed; `hazards` are those it may use, chosen by the seed if None."""
    return _Walk(seed, algorithm, hazards).draw()


class _Walk(Position):
    """A walk from one position to the next."""

    def draw(self) -> Script:
        self.using: set[str] = set()
        length = self.chance.randint(6, 22)
        while len(self.actions) < length:
            moves = [(move, weight) for move, weight in self.moves() if weight > 0]
            (move,) = self.chance.choices([each for each, _ in moves], [weight for _, weight in moves])
            move()
            self.met += [frozenset(self.using)] * (len(self.actions) - len(self.met))
        self.finish()
        return Script(
            seed=self.seed,
            num_ranks=self.num_ranks,
            choice=self.first_choice,
            buffers=self.buffers,
            optimizer=self.optimizer,
            warmup=self.warmup,
            actions=tuple(self.actions),
            hazards=tuple(self.met),
        )

    def moves(self) -> list[tuple[Callable[[], None], float]]:
        between, allowed = self.is_between, self.allowed
        can_step = between and self.rounds_since_step > 0
        is_clean = between and self.rounds_since_step == 0
        return [
            (self.forward, 6.0 if not self.live else 1.0 if LIVE not in allowed or self.rounds_of_live else 3.0),
            (self.backward, 6.0 if self.live else 0.0),
            (self.sync, 3.0 if self.is_held else 0.0),
            (self.step, 8.0 if can_step else 0.0),
            (self.by_hand, 3.0 if between and BY_HAND in allowed and self.round else 0.0),
            (self.evaluate, 0.5),
            (self.collect, (3.0 if self.is_pending else 0.7) if self.can_meet else 0.0),
            (
                self.save,
                (1.0 if self.is_pending or RESUME in allowed else 0.4) if between else 0.0,
            ),
            (self.load, 1.0 if between and self.can_load else 0.0),
            (self.resume, 4.0 if between and self.can_load and RESUME in allowed else 0.0),
            (self.load_weights, 1.0 if between and LOAD in allowed else 0.0),
            (self.switch, (2.5 if self.is_restless else 1.0) if between and SWITCH in allowed else 0.0),
            (self.freeze, (2.0 if RESUME in allowed else 0.3) if is_clean and not self.is_warming else 0.0),
            (self.thaw, 3.0 if is_clean and THAW in allowed and self.can_thaw else 0.0),
            (self.join, (1.5 if JOIN in allowed or self.is_pending else 0.3) if between and self.can_join else 0.0),
        ]

    def finish(self) -> None:
        """Come to the end of a round, and close."""
        if self.is_held:
            self.sync()
        if self.is_open:
            self.add(self.root_forward(in_no_sync=False))
            self.add(Backward((self.num_slots - 1,), False, False))
            self.round_ended()
        if self.rounds_since_step and not self.can_meet:
            self.add(Step())
            self.rounds_since_step = 0
        self.meet()
        self.add(Close())
        self.met += [frozenset(self.using)] * (len(self.actions) - len(self.met))

    # Rounds

    def root_forward(self, in_no_sync: bool, in_eval: bool = False) -> Forward:
        kind = self.chance.choice(("ddp", "ddp", "module"))
        always = self.is_warming
        spare = tuple(always or (self.is_lucky(0.5) and not self.spare_is_frozen) for _ in range(self.num_ranks))
        self.num_slots += 1
        self.last_root_in_no_sync = in_no_sync
        return Forward(self.num_slots - 1, kind, in_eval, in_no_sync, spare)

    def forward(self) -> None:
        if self.rounds_of_live:
            self.forget_live()  # what is owed is settled now, which may change the weights
        in_no_sync, was_idle = self.is_lucky(0.25), not self.is_open and not self.is_held
        if NO_ROOT in self.allowed and not self.is_warming and self.is_lucky(0.7):
            kind = self.chance.choice(("part", "method", "raw", "eval", "eval"))
            if kind != "raw":
                self.begin_phase()
            if kind == "eval":
                action = self.root_forward(in_no_sync, in_eval=True)
            else:
                action = Forward(self.num_slots, kind, self.is_lucky(0.3), in_no_sync, (False,) * self.num_ranks)
                self.num_slots += 1
            self.use(NO_ROOT)
        else:
            self.begin_phase()
            action = self.root_forward(in_no_sync)
            self.is_open = True
            if self.buffers:  # a training forward changes what an evaluating one has saved for its backward
                self.live = {slot: each for slot, each in self.live.items() if not (each.is_root and each.in_eval)}
        if action.kind != "raw" and was_idle:
            self.settled()
        if not self.live:
            self.rounds_of_live = 0
        self.live[action.slot] = action
        self.has_begun = True
        self.add(action)

    def backward(self) -> None:
        slots = tuple(sorted(self.chance.sample(sorted(self.live), self.chance.randint(1, len(self.live)))))
        retain = LIVE in self.allowed and self.is_lucky(0.4)
        if any(self.live[slot].is_root for slot in slots):
            is_local = in_no_sync = self.last_root_in_no_sync
            if MIXED in self.allowed and self.is_lucky(0.5):
                in_no_sync = not in_no_sync
                self.use(MIXED)
        else:
            is_local = in_no_sync = self.is_lucky(0.25)
        if self.rounds_of_live:
            self.use(LIVE)
        may_spoil = self.optimizer == "qadam" and SKIP in self.allowed and not is_local
        spoiled = self.some_ranks() if may_spoil and self.is_lucky(0.25) else []
        self.add(Backward(slots, retain, in_no_sync, tuple(spoiled)))
        if not retain:
            for slot in slots:
                del self.live[slot]
        if is_local:
            self.is_held = True
        else:
            self.round_ended()
            if LIVE not in self.allowed:
                self.forget_live()
        if spoiled:
            self.use(SKIP)
            self.step(spoiled)

    def some_ranks(self) -> list[int]:
        everyone = range(self.num_ranks)
        return sorted(self.chance.sample(everyone, self.chance.randint(1, self.num_ranks)))

    def begin_phase(self) -> None:
        """The next phase of the algorithm, if it is due and a forward or a step leads to it."""
        if self.is_phase_due and not self.is_open and not self.is_held:
            assert self.given.then is not None
            self.use(SWITCH)
            if self.rounds_since_step:
                self.zero_grad()
                self.rounds_since_step = 0
            self.change_to(self.given.then)

    def change_to(self, choice: Choice) -> None:
        if self.is_of_weights and choice.name in OF_GRADIENTS:
            self.steps = [min(self.steps)] * self.num_ranks
        self.choice = choice
        self.changed_weights()

    def round_ended(self) -> None:
        self.began_late = not self.is_open
        self.is_open = self.is_held = self.has_begun = False
        self.round += 1
        self.rounds_of_live += 1
        self.rounds_since_step += 1

    def forget_live(self) -> None:
        self.live, self.rounds_of_live = {}, 0

    def sync(self) -> None:
        self.add(Sync(overlapped=self.is_lucky(0.5)))
        self.round_ended()
        if LIVE not in self.allowed:
            self.forget_live()

    # Steps

    def step(self, spoiled: Sequence[int] = ()) -> None:
        skipping: list[int] = []
        is_scaled = self.optimizer == "qadam" and self.is_lucky(0.5)
        if SKIP in self.allowed and self.is_lucky(0.5):
            is_alone = self.is_of_weights or (self.choice.name in OF_QADAM and not self.is_warming)
            skipping = self.some_ranks() if is_alone else list(range(self.num_ranks))
            self.use(SKIP)
        if self.is_phase_due and self.began_late and not is_scaled:
            skipping = []  # the step begins the next phase, for which all ranks are needed
        self.add(Step(tuple(skipping), is_scaled))
        was_warming, left_out = self.is_warming, {*skipping, *spoiled}
        if left_out and not self.is_of_weights:
            left_out = set(range(self.num_ranks))
        self.steps = [count + (rank not in left_out) for rank, count in enumerate(self.steps)]
        self.is_pending = bool(skipping)
        self.changed_weights()
        self.rounds_since_step = 0
        if spoiled or self.is_lucky(0.9):
            self.zero_grad()
        left_out_by_all = self.choice.name in OF_QADAM and not was_warming and bool(left_out)
        if self.began_late and (not skipping or is_scaled) and not left_out_by_all:
            self.begin_phase()

    def zero_grad(self, to_none: bool | None = None) -> None:
        self.add(ZeroGrad(self.is_lucky(0.7) if to_none is None else to_none))

    def changed_weights(self) -> None:
        self.forget_live()

    def by_hand(self) -> None:
        self.use(BY_HAND)
        is_local = self.choice.name in OF_QADAM and not self.is_warming  # gradients are, there
        kind = "perturb" if is_local or not self.rounds_since_step or self.is_lucky(0.5) else "descend"
        self.add(ByHand(kind, alike=not self.is_of_weights))
        self.changed_weights()
        if kind == "descend" and self.is_lucky(0.7):
            self.zero_grad()
            self.rounds_since_step = 0
            self.is_pending = True

    # Looking

    def evaluate(self) -> None:
        self.add(Evaluate())

    def collective_point(self) -> None:
        if not self.is_open:
            if self.rounds_of_live:
                self.forget_live()
            self.settled()

    def settled(self) -> None:
        """What was owed has been written; a raw forward does not settle, so its loss may be older than that."""
        self.is_pending = False
        self.live = {slot: each for slot, each in self.live.items() if each.kind != "raw"}

    def collect(self) -> None:
        kinds = ["average_losses", "all_reduce", "barrier", "channel"]
        if self.is_between:
            kinds += ["consensus", "average", "state"]
            if not self.is_of_weights and self.choice.name not in OF_QADAM:
                kinds.append("verify")
        kind = self.chance.choice(kinds)
        self.meet()
        self.add(Collect(kind))
        self.collective_point()
        if kind == "average":
            self.changed_weights()

    # Checkpoints and other weights

    def save(self) -> None:
        self.add(Save(len(self.actions) + 1))
        self.collective_point()
        self.saved = self.given, self.choice, self.round, [*self.steps]

    def load(self) -> None:
        self.add(Load())
        self.loaded()

    def loaded(self) -> None:
        assert self.saved is not None
        self.given, self.choice, self.round, self.steps = self.saved
        self.changed_weights()
        self.zero_grad(to_none=True)
        self.rounds_since_step = 0
        self.is_pending = False

    def resume(self) -> None:
        self.use(RESUME)
        self.add(Resume())
        self.loaded()

    def load_weights(self) -> None:
        self.use(LOAD)
        ways = ["ddp", "broadcast"]
        if not self.is_pending and not self.rounds_since_step and self.choice.name != "async":
            ways.append("module")
        self.add(LoadWeights(self.chance.choice(ways), seed=self.seed + len(self.actions)))
        self.changed_weights()
        self.zero_grad()
        self.rounds_since_step = 0
        self.is_pending = False

    # The algorithm and what is trained

    def switch(self) -> None:
        self.use(SWITCH)
        choice = Choice(self.chance.choice(self.targets()), self.chance.choice((1, 2, 3)))
        self.change_to(choice)
        self.given = self.choice
        if self.optimizer == "qadam" and self.is_lucky(0.4):
            self.given = self.choice = self.with_phase(choice)
        self.add(Switch(self.given))
        self.zero_grad()
        self.rounds_since_step = 0
        self.is_pending = False

    def freeze(self) -> None:
        if self.spare_is_frozen:
            self.use(THAW)
            self.add(Thaw("spare"))
        else:
            self.add(Freeze("spare"))
            self.zero_grad(to_none=True)
        self.spare_is_frozen = not self.spare_is_frozen
        self.forget_live()

    def thaw(self) -> None:
        self.use(THAW)
        self.add(Thaw("late"))
        self.late_is_frozen = False
        self.forget_live()

    def join(self) -> None:
        self.meet()
        if self.choice.name == "async":
            self.use(OWED)
        self.last_root_in_no_sync = False
        lengths = tuple(self.chance.randint(1, 3) for _ in range(self.num_ranks))
        backwards = every = 1
        if JOIN in self.allowed:
            backwards, every = self.chance.choice(((2, 1), (1, 2), (2, 2)))
            self.use(JOIN)
        self.add(Join(lengths, backwards, every, self.num_slots))
        self.num_slots += max(lengths)
        self.round += backwards * max(lengths)
        self.steps = [count - (-max(lengths) // every) for count in self.steps]
        self.changed_weights()
        self.zero_grad()
        self.rounds_since_step = 0
        self.is_pending = False
