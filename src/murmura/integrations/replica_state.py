"""Checkpoints of frameworks: a plain file with the mean of the replicas, and files beside it for each rank's own state.

The plain file loads anywhere. A run that resumes with as many ranks continues from every rank's own weights, optimizer
state and algorithm state. Where replicas are equal, a rank's own file holds only what differs from rank 0's.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from murmura.checkpoint.digests import digest
from murmura.checkpoint.files import load_tensors, write_tensors, write_text
from murmura.checkpoint.on_all_ranks import on_all_ranks
from murmura.checkpoint.stateful import Stateful
from murmura.ddp import DDP
from murmura.errors import CheckpointError, ConfigError
from murmura.transports.objects import all_gather_json
from murmura.types import Exchanges

FORMAT = 2


def replicas_differ(ddp: DDP) -> bool:
    """Whether the replicas may hold different weights now. Collective, equal on all ranks."""
    # From all ranks: an asynchronous algorithm may be in another phase on another rank.
    return Exchanges.WEIGHTS in all_gather_json(ddp.transport, str(ddp.algorithm.exchanges))


def replicas_never_differ(ddp: DDP) -> bool:
    """Whether the replicas hold equal weights after every step, in all rounds. Not collective, equal on all ranks."""
    return type(ddp.algorithm).exchanges is Exchanges.GRADIENTS  # a property where it changes from round to round


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict like `state`, with tensors in memory of their own."""
    copy = OrderedDict(
        (key, each.detach().clone() if isinstance(each, Tensor) else each) for key, each in state.items()
    )
    if hasattr(state, "_metadata"):  # the versions of the modules
        copy._metadata = state._metadata  # type: ignore[attr-defined]
    return copy


def averaged(ddp: DDP) -> AbstractContextManager[None]:
    """Inside it the module holds the mean of the replicas if these differ. Collective, unless the algorithm keeps
    replicas equal in every round."""
    is_mean = replicas_never_differ(ddp) or not replicas_differ(ddp)
    return contextlib.nullcontext() if is_mean else ddp.average_parameters()


def mean_state_dict(ddp: DDP) -> dict[str, Any]:
    """The mean of all replicas as a state dict of the bare module, in memory of its own. Collective."""
    ddp.settle()
    with averaged(ddp):
        return copied(ddp.state_dict())


def optimizers_of(ddp: DDP, optimizers: Iterable[Any]) -> list[Optimizer]:
    """Those of `optimizers` that step on parameters of `ddp`, without the wrappers that frameworks put around them."""
    own, found = {id(parameter) for parameter in ddp.parameters()}, []
    for optimizer in optimizers:
        while not isinstance(optimizer, Optimizer) or isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = optimizer.optimizer
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            found.append(optimizer)
    return found


def own_state(ddp: DDP, optimizers: Sequence[Stateful], others: Sequence[Stateful] = ()) -> dict[str, Any]:
    """What this rank needs in addition to the plain file to resume exactly. Collective.

    Call it after an optimizer's step and before the next forward. The tensors are the model's own: write or copy them
    before training continues. `others` are further objects that may differ between ranks: schedulers, a GradScaler.
    """
    algorithm = ddp.algorithm_state_dict()  # first, for it may communicate and write weights
    parts = {
        "model": dict(ddp.state_dict()),
        "optimizers": {str(index): each.state_dict() for index, each in enumerate(optimizers)},
        "others": {str(index): each.state_dict() for index, each in enumerate(others)},
    }
    differ = replicas_differ(ddp)
    if not differ:
        parts = _unlike_rank_0(ddp, parts)
    transport = ddp.transport
    about = {"format": FORMAT, "rank": transport.rank, "world_size": transport.world_size, "differ": differ}
    about |= {"num_optimizers": len(optimizers), "num_others": len(others)}
    return {**about, **parts, "algorithm": algorithm}


def load_own_state(
    ddp: DDP, optimizers: Sequence[Stateful], others: Sequence[Stateful], state: Mapping[str, Any]
) -> None:
    """Take over what `own_state` returned on this rank, after the plain file was loaded on every rank.

    The number of ranks may differ from that of the save if replicas were equal then. Raises `ConfigError`, before
    anything is changed, where the state does not fit. Only `Phased`, saved in a phase that does not run here, may find
    out later that the options of that phase have changed.
    """
    _check_fits(ddp, optimizers, others, state)
    same_size = state["world_size"] == ddp.transport.world_size
    if same_size:
        if state["model"]:
            ddp.load_state_dict({**ddp.state_dict(), **state["model"]})
        for index, each in state["optimizers"].items():
            optimizers[int(index)].load_state_dict(each)
        for index, each in state["others"].items():
            others[int(index)].load_state_dict(each)
    load_algorithm(ddp, state["algorithm"], optimizers, same_size=same_size)


def load_algorithm(ddp: DDP, saved: Mapping[str, Any], optimizers: Iterable[object], *, same_size: bool) -> None:
    """Load what `ddp.algorithm_state_dict()` returned, and tell `ddp` of its optimizers. Collective.

    If another number of ranks saved it, only the round is restored: the rest belongs to the ranks of then.
    """
    if not same_size:
        saved = {**saved, "algorithm": ddp.algorithm_state_dict()["algorithm"]}
    ddp.load_algorithm_state_dict(saved)
    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            ddp.remember_optimizer(optimizer)


# Files


def own_file(folder: str | os.PathLike[str], rank: int, name: str = "murmura") -> Path:
    """The file of a rank's own state in `folder`; `name` tells the models of one checkpoint apart."""
    return Path(folder) / f"{name}-rank-{rank}.pt"


def mark_file(folder: str | os.PathLike[str], name: str = "murmura") -> Path:
    """The mark of a complete save in `folder`; rank 0 writes it last."""
    return Path(folder) / f"{name}-complete.json"


@contextlib.contextmanager
def saving_own_state(
    folder: str | os.PathLike[str],
    ddp: DDP,
    optimizers: Sequence[Stateful],
    others: Sequence[Stateful] = (),
    *,
    name: str = "murmura",
) -> Iterator[None]:
    """Write `own_state` of every rank into `folder`; write the plain files inside this context.

    Ranks may share the folder or have one each. It may hold an older checkpoint: the mark of a complete save is removed
    before the first file is replaced and written after the last, so a kill at any moment leaves either a complete
    checkpoint or one that is refused. Collective at entry and exit; a failure to write on one rank is raised on all.
    """
    transport = ddp.transport
    rank, mark = transport.rank, mark_file(folder, name)
    path = own_file(folder, rank, name)
    partial = path.with_suffix(".partial")
    advice = "Make room, or mend the folder, and save again."
    state = own_state(ddp, optimizers, others)

    def begin() -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        return uuid.uuid4().hex

    def write() -> None:
        write_tensors(partial, {**state, "id": identity})

    def replace() -> None:
        mark.unlink(missing_ok=True)
        partial.replace(path)

    def end() -> None:
        if rank == 0:
            for each in path.parent.glob(f"{name}-rank-*.pt"):  # of an older save, by more ranks
                if int(each.stem.rpartition("-")[2]) >= transport.world_size:
                    each.unlink()
            write_text(mark, json.dumps({"id": identity, "world_size": transport.world_size}))

    identity: str = on_all_ranks(transport, f"saving {path}", advice, begin)[0]
    try:
        on_all_ranks(transport, f"saving {path}", advice, write)  # with an older checkpoint left whole if it fails
        on_all_ranks(transport, f"saving {path}", advice, replace)
    finally:
        partial.unlink(missing_ok=True)
    yield
    transport.barrier()  # the plain files of all ranks are there
    on_all_ranks(transport, f"saving {mark}", advice, end)


def restore_own_state(
    folder: str | os.PathLike[str],
    ddp: DDP,
    optimizers: Sequence[Stateful],
    others: Sequence[Stateful] = (),
    *,
    name: str = "murmura",
) -> bool:
    """Load what `saving_own_state` wrote, after the plain file was loaded on every rank. Collective.

    Returns False, and changes nothing, if no rank finds a file: then the checkpoint was made without murmura. Raises
    `CheckpointError` if the save was cut short.
    """
    transport = ddp.transport
    own, first = own_file(folder, transport.rank, name), own_file(folder, 0, name)
    state: dict[str, Any] = {}

    def read() -> list[str | None]:
        path = own if own.exists() else first  # of fewer ranks, if replicas were equal
        mark = mark_file(folder, name)
        if not path.exists():
            return [None, None]
        state.update(load_tensors(path))
        if path != own and state["world_size"] > transport.rank:
            raise CheckpointError(f"{own} is missing, and rank {transport.rank} has saved it")
        _check_fits(ddp, optimizers, others, state)
        return [state["id"], _identity_in(mark) if transport.rank == 0 and mark.exists() else None]

    found = on_all_ranks(transport, f"loading {own}", "The plain file beside it loads without this state.", read)
    missing = [rank for rank, (identity, _) in enumerate(found) if identity is None]
    if 0 < len(missing) < len(found):
        raise CheckpointError(
            f"loading {own} failed: ranks {missing} find neither a file of their own nor rank 0's in {folder}, and the "
            "others do. Give all ranks the same folder."
        )
    if missing:
        return False
    if {identity for identity, _ in found} != {found[0][1]}:
        raise CheckpointError(
            f"loading {own} failed: the files in {folder} are not of one save, because the last one into it was cut "
            "short. Load another checkpoint, and save each one into a folder of its own. If there is none, remove "
            f"{name}-rank-*.pt to begin with the plain files, which may be of two saves too."
        )
    load_own_state(ddp, optimizers, others, state)
    return True


def _identity_in(mark: Path) -> str:
    """The identity of the save that `mark` declares complete."""
    try:
        identity: str = json.loads(mark.read_text())["id"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{mark} is damaged, so nothing says that the save is complete. Load another checkpoint"
        ) from error
    return identity


def _unlike_rank_0(ddp: DDP, parts: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What of `parts` differs from rank 0's; nothing on rank 0, whose state is in the plain file."""
    digests = {f"{kind} {name}": digest(value) for kind, values in parts.items() for name, value in values.items()}
    of_rank_0 = all_gather_json(ddp.transport, digests if ddp.transport.rank == 0 else {})[0]
    return {
        kind: {
            name: value
            for name, value in values.items()
            if digests[f"{kind} {name}"] != of_rank_0.get(f"{kind} {name}")
        }
        for kind, values in parts.items()
    }


def _check_fits(ddp: DDP, optimizers: Sequence[Stateful], others: Sequence[Stateful], state: Mapping[str, Any]) -> None:
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"this state has format {state.get('format')!r}, and this version of murmura reads format {FORMAT}. Read "
            "it with the version that wrote it"
        )
    here = ddp.transport.world_size
    if state["differ"] and (state["world_size"], state["rank"]) != (here, ddp.transport.rank):
        raise ConfigError(
            f"this state was saved by rank {state['rank']} of {state['world_size']}, each with weights of its own, and "
            f"this is rank {ddp.transport.rank} of {here}. Go on with {state['world_size']} ranks, or begin anew from "
            "the plain file, which holds the mean of their weights"
        )
    for key, what, given in (
        ("num_optimizers", "optimizers", optimizers),
        ("num_others", "schedulers and scalers", others),
    ):
        if state[key] != len(given):
            raise ConfigError(
                f"this state was saved with {state[key]} {what}, and here are {len(given)}. Resume with the same"
            )
    name = type(ddp.algorithm).__name__
    if state["algorithm"]["name"] != name:
        raise ConfigError(
            f"this state was saved by {state['algorithm']['name']}, and {name} is running. Resume with the algorithm "
            "that was saved, or begin anew from the plain file"
        )
    if state["world_size"] == here:  # otherwise only the round is taken over
        ddp.check_algorithm_state(state["algorithm"])
