"""Checkpointer saves and loads the state of a whole world; a kill at any moment leaves only complete checkpoints."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

from torch.optim import Optimizer

from murmura.checkpoint.files import make_folder
from murmura.checkpoint.loading import Loading
from murmura.checkpoint.lock import FolderLock
from murmura.checkpoint.manifest import folder_name, steps_in
from murmura.checkpoint.saving import Saving
from murmura.checkpoint.stateful import Stateful
from murmura.ddp import DDP
from murmura.errors import ConfigError
from murmura.transports.base import Transport

log = logging.getLogger("murmura")


@dataclass(frozen=True)
class Restored:
    """The checkpoint that `Checkpointer.load` restored.

    Attributes:
        step: the step at which it was saved.
        extra: what rank 0 saved as `extra`, after a round trip through JSON.
        path: the folder of the checkpoint.
    """

    step: int
    extra: Any
    path: Path


class Checkpointer:
    """Writes checkpoints of a whole world into `folder` and keeps the newest `keep` of them.

    Every rank makes one on the same folder, which must be visible to all of them. `save` and `load` are collective: an
    error on one rank is a `CheckpointError` on all of them, and leaves earlier checkpoints as they are. Only tensors
    and plain values are unpickled. From the first save on, this job locks the folder: another job that saves there gets
    a `CheckpointError`, but may load.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise ConfigError(f"folder={folder!r}: give the path of a folder, such as 'checkpoints'.")
        if isinstance(keep, bool) or not isinstance(keep, SupportsIndex) or operator.index(keep) < 1:
            raise ConfigError(f"keep={keep!r}: give the number of checkpoints to keep, a whole one from 1 on.")
        self.folder = Path(folder).absolute()
        self.keep = operator.index(keep)
        make_folder(self.folder, "checkpoints cannot be written to")
        self._known_step: int | None = None  # the step that this run saved or loaded last
        self._channel: tuple[Transport, Transport] | None = None  # DDP's transport, and a channel of it for checkpoints
        self._has_saved = False
        self._lock = FolderLock(self.folder)

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None if there is none. Not collective."""
        return max(steps_in(self.folder), default=None)

    def save(self, step: int, *, ddp: DDP, extra: Any = None, **parts: Stateful | None) -> Path:
        """Save the state of all ranks after `step` steps and return the checkpoint's folder. Collective.

        Call it between rounds, after the optimizer's step: gradients are not saved. A step that this run has just
        saved or loaded is not written again.

        Args:
            extra: any JSON value; rank 0's is saved.
            parts: ``optimizer=``, ``scheduler=``, ``sampler=``, ``scaler=``, or any other name: what has a state_dict.
        """
        step = operator.index(step)
        ddp.settle()
        _register_optimizers(ddp, parts)
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

        The number of ranks may differ from that of the save if the algorithm keeps replicas equal. Then all ranks load
        what rank 0 saved, random number generators keep their state, and of the algorithm's state only the round is
        restored.
        """
        found = Loading(self.folder, self._channel_of(ddp), ddp, _given(parts)).run(step)
        if found is None:
            return None
        _register_optimizers(ddp, parts)
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


def _register_optimizers(ddp: DDP, parts: Mapping[str, Stateful | None]) -> None:
    for part in _given(parts).values():
        if isinstance(part, Optimizer):
            ddp.remember_optimizer(part)


def _given(parts: Mapping[str, Stateful | None]) -> dict[str, Stateful]:
    return {name: part for name, part in sorted(parts.items()) if part is not None}
