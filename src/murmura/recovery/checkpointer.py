"""Checkpoints of a whole world: each is complete or not there, whenever the world is killed."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

from torch.optim import Optimizer

from murmura.ddp import DDP
from murmura.errors import ConfigError
from murmura.recovery.files import probe
from murmura.recovery.loading import Loading
from murmura.recovery.lock import FolderLock
from murmura.recovery.manifest import folder_name, steps_in
from murmura.recovery.saving import Saving
from murmura.recovery.stateful import Stateful
from murmura.transports.base import Transport

log = logging.getLogger("murmura")


@dataclass(frozen=True)
class Restored:
    """What `Checkpointer.load` has restored.

    Attributes:
        step: the step it was saved at.
        extra: what rank 0 saved as `extra`, as JSON tells it.
        path: the folder of the checkpoint.
    """

    step: int
    extra: Any
    path: Path


class Checkpointer:
    """Writes checkpoints of a whole world into `folder` and keeps the newest `keep` of them.

    Every rank makes one on the same folder, which all of them must see. `save` and `load` are collective: an error on
    one rank is a `CheckpointError` on all of them, and leaves earlier checkpoints as they are. Nothing is unpickled
    but tensors and plain values. From its first save on the folder is this job's alone: another job that saves there
    gets a `CheckpointError`, and may load.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"folder={folder!r}: give the path of a folder, such as 'checkpoints'.")
        if isinstance(keep, bool) or not isinstance(keep, SupportsIndex) or operator.index(keep) < 1:
            raise ConfigError(f"keep={keep!r}: give the number of checkpoints to keep, a whole one from 1 on.")
        self.folder = Path(folder).absolute()
        self.keep = operator.index(keep)
        probe(self.folder)
        self._known_step: int | None = None  # what this run saved or loaded last
        self._channel: tuple[Transport, Transport] | None = None  # that of a world, and one of our own beside it
        self._has_saved = False
        self._lock = FolderLock(self.folder)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none. Not collective."""
        return max(steps_in(self.folder), default=None)

    def save(self, step: int, *, ddp: DDP, extra: Any = None, **parts: Stateful | None) -> Path:
        """Save the state of all ranks after `step` steps, and return the folder of it. Collective.

        Call it between rounds, after the optimizer's step: gradients are not saved. A step that this run has just
        saved or loaded is not written again.

        Args:
            extra: anything that JSON can hold; rank 0's is kept.
            parts: ``optimizer=``, ``scheduler=``, ``sampler=``, ``scaler=``, or any other name: what has a state_dict.
        """
        step = operator.index(step)
        ddp.settle()
        _tell_of_optimizers(ddp, parts)
        is_known = step == self._known_step
        saving = Saving(self.folder, self.keep, self._channel_of(ddp), ddp, step, _given(parts), extra, self._lock)
        saving.run(is_known=is_known, is_first=not self._has_saved)
        self._known_step = step
        self._has_saved |= not is_known
        return self.folder / folder_name(step)

    def load(self, *, ddp: DDP, step: int | None = None, **parts: Stateful | None) -> Restored | None:
        """Restore the newest checkpoint, or that of `step`, into `ddp` and into the same `parts` that were saved.

        Returns None, and changes nothing, if `step` is None and there is no checkpoint. Collective. Files are verified
        on all ranks before anything is changed; after an error that comes later the contents are undefined.

        With another number of ranks than at the time of saving, which is possible if the algorithm keeps replicas
        equal, all ranks take over what rank 0 saved, random numbers are left alone, and what the algorithm remembers
        beside the round starts anew.
        """
        found = Loading(self.folder, self._channel_of(ddp), ddp, _given(parts)).run(step)
        if found is None:
            return None
        _tell_of_optimizers(ddp, parts)
        self._known_step = found.step
        newest = self.latest()
        if newest is not None and newest > found.step:
            log.warning(
                "step %d was loaded from %s, where there are later checkpoints up to step %d; "
                "saving will be refused until these are removed",
                *(found.step, self.folder, newest),
            )
        return Restored(found.step, found.extra, self.folder / folder_name(found.step))

    def _channel_of(self, ddp: DDP) -> Transport:
        if self._channel is None or self._channel[0] is not ddp.transport:
            self._channel = ddp.transport, ddp.transport.channel("checkpoints")
        return self._channel[1]


def _tell_of_optimizers(ddp: DDP, parts: Mapping[str, Stateful | None]) -> None:
    for part in _given(parts).values():
        if isinstance(part, Optimizer):
            ddp.remember_optimizer(part)


def _given(parts: Mapping[str, Stateful | None]) -> dict[str, Stateful]:
    return {name: part for name, part in sorted(parts.items()) if part is not None}
