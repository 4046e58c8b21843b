"""A script in one process: what every rank must hold after every action.

Each rank is a generator that runs through the script by itself and yields where it waits for others; what ranks
exchange lies on a board, and an exchange is over when every rank has brought its part. So a rank that skips a step and
one that does not may be at different actions, as in a real world, and a script in which ranks wait for each other is
found here.

Readings, where more than one is possible:

- A backward that passes an output of the root is decided by the root's last forward, as in torch, also if that is
  another one than the backward passes; one that passes none is decided when it starts.
- The number of a meeting under shift_one is t // interval, also after a change of the algorithm: t goes on counting.
- Inside a round (after its first training forward of the root, or after a local backward) nothing is settled, but for
  what other ranks wait for before a local backward's round has been opened.
- An operation of the user's own on the transport, consensus_distance, average_parameters and verify_in_sync settle only
  what another rank waits for: the exchange of a rank that has stepped. All else (an average that is ready, a step that
  all ranks have skipped or that is still to come) waits for a forward or for another call of the wrapper's.
- What rounds before the last owe is settled before the step. A round that began in its backward is settled after the
  step too, because no forward may follow that tells of the next.
- Under asynchronous averaging a second round on live graphs takes its snapshot of the weights as they would be.
- Where gradients are exchanged, rank 0's buffers are taken over at a round's first training forward of the root, or, in
  a round without one, before its step is done, or when it is settled.
- Moments that a change from weights to gradients averages are all floating-point tensors and numbers of the optimizer's
  state, step counts included; a rank without any of a parameter counts as zeros. They wait until all ranks know it.
- After QAdam's warm-up replayed batches of a join count as gradients of zero.
- consensus_distance looks at all parameters, frozen ones too; buffers do not count.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sequences.actions import (
    Action,
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
    Net,
    Resume,
    Save,
    Script,
    Step,
    Switch,
    Sync,
    Thaw,
    ZeroGrad,
    batch_of,
    change_by_hand,
    floats,
    loss_of,
    make_model,
    row_of,
)
from sequences.algorithms import Layout
from sequences.compressed_rules import FEW_BYTES, Undetermined
from sequences.exchanges import Board, Key, result_of
from sequences.local_rules import LOCAL
from sequences.optimizers import WithOptimizer
from sequences.qadam_rules import QADAM
from sequences.rules import RULES, Rule, Waiting, Weights, mean_of


class Replica(WithOptimizer):
    """One simulated rank."""

    def __init__(self, number: int, script: Script, board: Board, model: Net, layouts: Sequence[Layout]) -> None:
        self.number, self.script, self.board, self.model = number, script, board, model
        self.layouts = iter(layouts)
        self.num_posted: defaultdict[str, int] = defaultdict(int)
        self.build_optimizer()
        self.round = 0
        self.is_open = False  # the round's first training forward of the root has been
        self.own_gradients: dict[str, Tensor] = {}  # those of the round under way
        self.weight = 1.0  # the share of real batches in the round under way
        self.is_replaying = False
        self.buffers_pending = False  # rank 0's are still to be taken over
        self.was_late = False  # the last round began in its backward
        self.is_held = False  # local backwards have left gradients for the round under way
        self.last_root_in_no_sync = False
        self.losses: dict[int, tuple[Tensor, Forward]] = {}
        self.known = self.trained()  # what the algorithm keeps together
        self.placed = set(self.known)  # what has a place among the gradients that travel, once trained
        self.saved: dict[str, Any] = {}
        self.results: list[float] = []
        self.rows: list[Tensor] = []
        self.given = self.choice = script.choice  # with its phases, and the present one
        self.skips_step = False  # a gradient is not finite
        self.rule = self.make_rule()
        self.rule.begin()

    def make_rule(self) -> Rule:
        return {**RULES, **FEW_BYTES, **LOCAL, **QADAM}[self.choice.name](self, self.choice)

    def next_layout(self) -> Layout:
        """The parameters in the order in which their gradients travel in the round under way."""
        return next(self.layouts, tuple(name for name, _ in self.included()))  # a world that raised tells of no more

    # Exchanges

    def post(self, channel: str, value: Any) -> Key:
        """Bring `value` to the next exchange on `channel`, without waiting; yielding the key waits for all ranks'."""
        key = (channel, self.num_posted[channel])
        self.num_posted[channel] += 1
        self.board.brought[key][self.number] = value
        return key

    def exchange(self, channel: str, value: Any) -> Generator[Any, Any, list[Any]]:
        everyone: list[Any] = yield self.post(channel, value)
        return everyone

    # Weights

    def included(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the algorithm keeps together."""
        return ((name, each) for name, each in self.model.named_parameters() if name in self.known)

    def trained(self) -> set[str]:
        return {name for name, each in self.model.named_parameters() if each.requires_grad}

    def weights(self) -> Weights:
        frozen = {name for name, _ in self.model.named_parameters()} - self.known
        return {name: each.clone() for name, each in floats(self.model) if name not in frozen}

    @torch.no_grad()
    def write(self, weights: Weights) -> None:
        for name, each in floats(self.model):
            if name in weights:
                each.copy_(weights[name])

    # Rounds

    def settle(self) -> Waiting:
        if not self.is_open and not self.is_held:
            yield from self.rule.settle()
            yield from self.take_pending_buffers()

    def begin_phase(self) -> Waiting:
        if self.choice is self.given and self.given.then is not None and self.round >= self.given.until:
            yield from self.replace(self.given.then)

    def open_round(self) -> Waiting:
        if thawed := [name for name, _ in self.model.named_parameters() if name in self.trained() - self.known]:
            yield from self.rule.settle()
        self.known, self.placed = self.known.union(thawed), self.placed.union(thawed)
        self.rule.take_in(thawed)
        yield from self.rule.open()
        self.buffers_pending = not self.rule.exchanges_weights

    def take_pending_buffers(self) -> Waiting:
        if self.buffers_pending:
            self.buffers_pending = False
            everyone = yield from self.exchange("buffers", [each.clone() for each in self.model.buffers()])
            for own, first in zip(self.model.buffers(), everyone[0], strict=True):
                own.copy_(first)

    def forward(self, kind: str, in_eval: bool, spare: bool, x: Tensor, y: Tensor) -> Generator[Any, Any, Tensor]:
        if kind != "raw":
            yield from self.settle()
            if not self.is_open and not self.is_held:
                yield from self.begin_phase()
                self.rule.look()
        if kind in ("ddp", "module") and not in_eval and not self.is_open:
            yield from self.open_round()
            yield from self.take_pending_buffers()
            self.is_open = True
        self.model.train(not in_eval)
        loss = loss_of(self.model, self.model, kind, spare, x, y)
        self.model.train()
        return loss

    def backward(self, loss: Tensor, retain: bool, synchronises: bool, passes_root: bool = True) -> Waiting:
        if passes_root and not self.is_held:
            self.rule.look()
        trained = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        found = torch.autograd.grad(
            loss, [each for _, each in trained], retain_graph=retain, allow_unused=True, materialize_grads=False
        )
        for (name, parameter), gradient in zip(trained, found, strict=True):
            if gradient is not None:
                gradient = torch.zeros_like(gradient) if self.is_replaying else gradient
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
                own = self.own_gradients.get(name)
                self.own_gradients[name] = gradient.clone() if own is None else own + gradient
        self.is_held = True
        if synchronises:
            yield from self.end_round()

    def end_round(self) -> Waiting:
        self.was_late = not self.is_open
        if self.was_late:
            yield from self.open_round()
        yield from self.rule.end()
        self.skips_step = any(not bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)
        self.round += 1
        self.is_open = self.is_held = False
        self.own_gradients = {}

    def step(self, skips: bool, is_scaled: bool = False) -> Waiting:
        if skips and not is_scaled:
            return
        yield from self.know_optimizer()
        if skips:
            self.adam().found_infinity = True
        yield from self.rule.before_step()
        if not self.rule.leaves_out_step:
            yield from self.take_pending_buffers()
        if self.skips_step:
            self.skips_step = False
            self.zero_grad()
        self.optimizer.step()
        yield from self.rule.after_step()
        if self.was_late and not self.rule.leaves_out_step:
            yield from self.settle()
            yield from self.begin_phase()

    # The script

    def run(self) -> Waiting:
        for at, action in enumerate(self.script.actions):
            self.results = []
            yield from self.act(at, action)
            self.rows.append(row_of(self.model, self.results))

    def act(self, at: int, action: Action) -> Waiting:
        seed = self.script.seed
        match action:
            case Forward():
                x, y = batch_of(seed, action.slot, self.number)
                loss = yield from self.forward(action.kind, action.in_eval, action.spare[self.number], x, y)
                self.losses[action.slot] = loss, action
                if action.is_root:
                    self.last_root_in_no_sync = action.in_no_sync
                self.results = [loss.item()]
            case Backward():
                passes_root = any(self.losses[slot][1].is_root for slot in action.slots)
                inside = self.last_root_in_no_sync if passes_root else action.in_no_sync
                total = torch.stack([self.losses[slot][0] for slot in action.slots]).sum()
                total = total * torch.nan if self.number in action.spoiled else total
                yield from self.backward(total, action.retain, not inside, passes_root)
            case Sync():
                yield from self.end_round()
            case Step():
                yield from self.step(self.number in action.skipping, action.is_scaled)
            case ZeroGrad():
                self.zero_grad(action.to_none)
            case ByHand():
                change_by_hand(self.model, action, seed, at, self.number)
            case Evaluate():
                self.evaluate(at)
            case Collect():
                if action.kind == "state":
                    yield from self.settle()
                    yield from self.know_optimizer(anew=self.moments_may_differ)
                elif not self.is_open:
                    yield from self.rule.before_collective()
                yield from self.collect(action.kind, at)
            case Save():
                yield from self.settle()
                yield from self.know_optimizer()
                self.saved = {
                    "model": copy.deepcopy(self.model.state_dict()),
                    "optimizer": copy.deepcopy(self.optimizer.state_dict()),
                    "rule": self.rule.state(),
                    "round": self.round,
                    "choice": self.choice,
                    "moments_may_differ": self.moments_may_differ,
                    "parameters": (set(self.known), set(self.placed)),
                }
            case Load():
                yield from self.settle()
                yield from self.load()
            case Resume():
                yield from self.settle()
                self.model.zero_grad()
                self.build_optimizer()
                self.choice = self.given
                self.rule = self.make_rule()
                yield from self.load()
            case LoadWeights():
                yield from self.load_weights(action)
            case Switch():
                yield from self.settle()
                self.given = action.choice
                yield from self.replace(action.choice)
            case Freeze():
                self.model.get_submodule(action.part).requires_grad_(False)
            case Thaw():
                self.model.get_submodule(action.part).requires_grad_(True)
            case Join():
                yield from self.join(action)
            case Close():
                yield from self.settle()

    def evaluate(self, at: int) -> None:
        x, _ = batch_of(self.script.seed, 1000 + at, 0)
        self.model.eval()
        with torch.no_grad():
            self.results = [float(self.model(x, True).sum()), float(self.model.encode(x).sum())]
        self.model.train()

    def collect(self, kind: str, at: int) -> Waiting:
        parameters = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        mine = (float(self.number + at), parameters, self.rule.weight_in_mean)
        self.results = result_of(kind, (yield from self.exchange("user", mine)))

    def load(self) -> Waiting:
        self.model.load_state_dict(self.saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(self.saved["optimizer"]))
        self.round = self.saved["round"]
        self.known, self.placed = map(set, self.saved["parameters"])
        if self.choice is not self.saved["choice"]:
            self.choice = self.saved["choice"]
            self.rule = self.make_rule()
        self.rule.begin()
        self.rule.restore(self.saved["rule"])
        self.moments_may_differ |= self.saved["moments_may_differ"]
        yield from self.know_optimizer(anew=self.saved["moments_may_differ"])

    def load_weights(self, action: LoadWeights) -> Waiting:
        yield from self.settle()
        state: dict[str, Tensor] = make_model(self.script.buffers, action.seed).state_dict()
        if action.through == "broadcast":
            everyone = yield from self.exchange("user", copy.deepcopy(self.model.state_dict()))
            state = everyone[-1]
        self.model.load_state_dict(state)
        self.rule.begin()

    def replace(self, choice: Choice) -> Waiting:
        before, self.choice = self.rule, choice
        self.rule = self.make_rule()
        if before.exchanges_weights:
            own = {name: before.weight_in_mean * each for name, each in floats(self.model)}
            self.write(mean_of((yield from self.exchange("weights", own))))
            self.moments_may_differ = True
        yield from self.average_known_moments()
        self.placed |= self.trained()
        self.known = self.trained() if self.rule.exchanges_weights else set(self.placed)
        self.rule.begin()

    def join(self, action: Join) -> Waiting:
        self.zero_grad()
        length = action.lengths[self.number]
        for count in range(max(action.lengths)):
            yield from self.settle()
            self.is_replaying = count >= length
            self.weight = 0.0 if self.is_replaying else 1.0
            x, y = batch_of(self.script.seed, action.first + min(count, length - 1), self.number)
            for _ in range(action.backwards):
                loss = yield from self.forward("ddp", False, False, x, y)
                yield from self.backward(loss, False, True)
            self.last_root_in_no_sync = False
            if (count + 1) % action.every == 0:
                yield from self.step(False)
                self.zero_grad()
        yield from self.settle()  # the vote that finds nobody with data
        self.is_replaying, self.weight = False, 1.0
        if max(action.lengths) % action.every:
            yield from self.step(False)


def simulate(script: Script, layouts: Sequence[Layout] = ()) -> list[Tensor]:
    """The rows of each rank, by action, as far as they are determined.

    `layouts` are the orders in which gradients travel, where it matters.
    """
    board = Board(script.num_ranks)
    first = make_model(script.buffers, seed=10 * script.seed)  # all begin with rank 0's
    ranks = [Replica(number, script, board, copy.deepcopy(first), layouts) for number in range(script.num_ranks)]
    waits: dict[int, Key | None] = {rank.number: None for rank in ranks}
    programs = [rank.run() for rank in ranks]
    while waits:
        ready = [number for number, key in waits.items() if key is None or board.is_full(key)]
        if not ready:
            ends = [len(rank.rows) for rank in ranks]
            raise AssertionError(f"ranks wait for each other after {ends} actions\n{script.told(min(ends))}")
        for number in ready:
            key = waits[number]
            try:
                waits[number] = programs[number].send(None if key is None else board.values(key))
            except StopIteration:
                del waits[number]
            except Undetermined:
                num_determined = min(len(rank.rows) for rank in ranks)
                return [torch.stack(rank.rows[:num_determined] or [torch.empty(0)])[:num_determined] for rank in ranks]
    return [torch.stack(rank.rows) for rank in ranks]
