"""A script on the library: what one rank of a world does, in the way a user would write it, with public names only."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import murmura
from murmura import DDP, Checkpointer, Transport
from sequences.actions import (
    Action,
    Backward,
    ByHand,
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
    batch_of,
    change_by_hand,
    loss_of,
    make_model,
    row_of,
)
from sequences.algorithms import Layout, algorithm_of, optimizer_of

LONG_SECONDS = 120.0  # for ranks that have no part in a script


class Rank:
    """One rank on its way through a script."""

    def __init__(self, transport: Transport, script: Script, folder: Path) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.script = script
        self.choice = script.choice
        self.channel = transport.channel("user")
        self.model = make_model(script.buffers, seed=10 * script.seed + self.rank)
        self.layouts: list[Layout] = []
        self.ddp = self.wrapped()
        self.optimizer = optimizer_of(script, self.model.parameters())
        self.folder = folder / str(script.seed)
        self.checkpointer: Checkpointer | None = None
        self.losses: dict[int, Tensor] = {}
        self.results: list[float] = []

    def wrapped(self) -> DDP:
        algorithm = algorithm_of(self.choice, self.layouts)
        return DDP(self.model, self.transport, algorithm=algorithm, nonfinite="skip_step")

    def run(self, rows: list[Tensor]) -> None:
        """Do all actions; `rows` tells after each of them what this rank holds."""
        for at, action in enumerate(self.script.actions):
            self.results = []
            self.act(at, action)
            rows.append(row_of(self.model, self.results))

    def act(self, at: int, action: Action) -> None:
        ddp, optimizer = self.ddp, self.optimizer
        match action:
            case Forward():
                self.forward(action)
            case Backward():
                with self.syncing(not action.in_no_sync):
                    total = torch.stack([self.losses[slot] for slot in action.slots]).sum()
                    if self.rank in action.spoiled:
                        total = total * torch.nan
                    total.backward(retain_graph=action.retain)  # type: ignore[no-untyped-call]
            case Sync():
                if action.overlapped:
                    ddp.overlapped_sync_gradients()
                else:
                    ddp.sync_gradients()
            case Step():
                self.step(self.rank in action.skipping, action.is_scaled)
            case ZeroGrad():
                optimizer.zero_grad(set_to_none=action.to_none)
            case ByHand():
                change_by_hand(self.model, action, self.script.seed, at, self.rank)
            case Evaluate():
                self.evaluate(at)
            case Collect():
                self.collect(action.kind, at)
            case Save():
                self.own_checkpointer().save(action.step, ddp=ddp, optimizer=optimizer)
            case Load():
                self.own_checkpointer().load(ddp=ddp, optimizer=optimizer)
            case Resume():
                self.resume(at)
            case LoadWeights():
                self.load_weights(action)
            case Switch():
                ddp.set_algorithm(algorithm_of(action.choice, self.layouts))
                self.choice = action.choice
            case Freeze():
                self.model.get_submodule(action.part).requires_grad_(False)
            case Thaw():
                self.model.get_submodule(action.part).requires_grad_(True)
            case Join():
                self.join(action)
            case Close():
                self.close()

    def close(self) -> None:
        self.ddp.close()
        self.channel.close()

    def syncing(self, synchronises: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if synchronises else self.ddp.no_sync()

    def forward(self, action: Forward) -> None:
        self.ddp.train(not action.in_eval)
        with self.syncing(not action.in_no_sync):
            x, y = batch_of(self.script.seed, action.slot, self.rank)
            self.losses[action.slot] = loss_of(self.ddp, self.model, action.kind, action.spare[self.rank], x, y)
        self.ddp.train()
        self.results = [self.losses[action.slot].item()]

    def step(self, skips: bool, is_scaled: bool) -> None:
        if skips and not is_scaled:
            return
        if skips:  # GradScaler always calls the step of QAdamOptimizer, and tells it what was found
            self.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
        self.optimizer.step()
        if skips:
            del self.optimizer.found_inf  # type: ignore[attr-defined]

    def evaluate(self, at: int) -> None:
        x, _ = batch_of(self.script.seed, 1000 + at, 0)
        self.ddp.eval()
        with torch.no_grad():
            self.results = [float(self.ddp(x, True).sum()), float(self.model.encode(x).sum())]
        self.ddp.train()

    def collect(self, kind: str, at: int) -> None:
        ddp, transport = self.ddp, self.transport
        mine = torch.tensor([float(self.rank + at)], dtype=torch.float64)
        match kind:
            case "average_losses":
                self.results = [murmura.average_losses(transport, mine, self.rank + 1)]
            case "all_reduce":
                transport.all_reduce(mine)
                self.results = mine.tolist()
            case "barrier":
                transport.barrier()
            case "channel":
                self.channel.all_reduce(mine)
                self.results = mine.tolist()
            case "verify":
                ddp.verify_in_sync()
            case "consensus":
                self.results = [ddp.consensus_distance()]
            case "average":
                with ddp.average_parameters():
                    self.results = [float(sum(p.detach().sum() for p in self.model.parameters()))]
            case "state":
                ddp.load_algorithm_state_dict(ddp.algorithm_state_dict())
                ddp.remember_optimizer(self.optimizer)

    def own_checkpointer(self) -> Checkpointer:
        if self.checkpointer is None:
            self.checkpointer = Checkpointer(self.folder)
        return self.checkpointer

    def resume(self, at: int) -> None:
        self.ddp.close()
        late_is_frozen = not self.model.late.weight.requires_grad
        spare_is_frozen = not self.model.spare.weight.requires_grad
        self.model = make_model(self.script.buffers, seed=at, late_is_frozen=late_is_frozen)
        self.model.spare.requires_grad_(not spare_is_frozen)
        self.ddp = self.wrapped()
        self.optimizer = optimizer_of(self.script, self.model.parameters())
        self.own_checkpointer().load(ddp=self.ddp, optimizer=self.optimizer)

    def load_weights(self, action: LoadWeights) -> None:
        if action.through == "broadcast":
            self.ddp.broadcast_parameters(self.script.num_ranks - 1)
            return
        state = make_model(self.script.buffers, action.seed).state_dict()
        if action.through == "ddp":
            self.ddp.load_state_dict(state)
        else:
            self.model.load_state_dict(state)

    def join(self, action: Join) -> None:
        self.optimizer.zero_grad()
        seed = self.script.seed
        batches = [batch_of(seed, action.first + number, self.rank) for number in range(action.lengths[self.rank])]
        count = 0
        for count, (x, y) in enumerate(self.ddp.join(batches), start=1):
            for _ in range(action.backwards):
                loss_of(self.ddp, self.model, "ddp", False, x, y).backward()  # type: ignore[no-untyped-call]
            if count % action.every == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        if count % action.every:
            self.optimizer.step()


@dataclass
class Told:
    """What one rank tells of one script: a row for each action that it finished, and the error that ended it.

    Also the order in which gradients travelled, in each round where it matters.
    """

    rows: Tensor
    error: str = ""
    layouts: Sequence[Layout] = ()


def run_scripts(transport: Transport, scripts: Sequence[Script], folder: Path, patience: float) -> list[Told | None]:
    """What runs on every rank of one world: one script after another, each on as many ranks as it wants.

    The world ends with the first script that raises. None stands for a script that had no use for this rank.
    """
    if multiprocessing.parent_process() is not None:
        warnings.simplefilter("error")
        torch.set_num_threads(1)
    groups: dict[int, Transport | None] = {}
    for size in sorted({script.num_ranks for script in scripts}):
        groups[size] = transport.split(f"ranks-{size}", range(size))
    told: list[Told | None] = []
    for script in scripts:
        group = groups[script.num_ranks]
        told.append(None if group is None else _run_script(group, script, folder, patience))
        mine = told[-1]
        failed = torch.tensor([int(mine is not None and bool(mine.error))])
        if failed.item():
            return told
        try:
            transport.all_reduce(failed, "max", timeout=LONG_SECONDS)
        except murmura.MurmuraError:
            return told
        if failed.item():
            return told
    return told


def _run_script(group: Transport, script: Script, folder: Path, patience: float) -> Told:
    group.timeout = patience
    rows: list[Tensor] = []
    rank: Rank | None = None
    error = ""
    try:
        rank = Rank(group, script, folder)
        rank.run(rows)
    except Exception as raised:
        error = _in_words(raised)
    finally:
        if rank is not None:
            with contextlib.suppress(Exception):
                rank.close()
    layouts = () if rank is None else rank.layouts
    return Told(torch.stack(rows) if rows else torch.empty(0, 0), error, layouts)


def _in_words(error: Exception) -> str:
    last: Any = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
