"""Save one checkpoint from all ranks: it is written under a temporary name, and renamed when it is complete."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from murmura.checkpoint import manifest as manifests
from murmura.checkpoint.digests import digest, num_bytes
from murmura.checkpoint.files import Checksum, sync_folder, write_tensors, write_text
from murmura.checkpoint.lock import FolderLock
from murmura.checkpoint.manifest import Manifest, folder_name, steps_in
from murmura.checkpoint.on_all_ranks import on_all_ranks
from murmura.checkpoint.randomness import random_state
from murmura.checkpoint.stateful import Stateful
from murmura.ddp import DDP
from murmura.errors import TransportError, UsageError
from murmura.transports.base import Transport
from murmura.types import Exchanges

log = logging.getLogger("murmura")


class Saving:
    """Begins, collects, writes and completes a checkpoint; each step ends when all ranks have done it."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        channel: Transport,
        ddp: DDP,
        step: int,
        parts: Mapping[str, Stateful],
        extra: Any,
        lock: FolderLock,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._lock = lock
        self._channel = channel
        self._is_rank_0 = channel.rank == 0
        self._ddp = ddp
        self._step = step
        self._parts = parts
        self._extra = extra
        self._has_begun = False
        self._final = folder / folder_name(step)
        self._partial = manifests.partial(self._final)
        advice = (
            "Earlier checkpoints are as they were, and training may go on. Make room, or mend the folder, and save."
        )
        self._on_all_ranks = functools.partial(on_all_ranks, channel, f"saving step {step} to {folder}", advice)

    def run(self, *, is_known: bool, is_first: bool) -> None:
        """Save, unless the step `is_known` to be saved; if this save `is_first`, check the free space before."""
        with contextlib.ExitStack() as locked:
            self._run(locked, is_known, is_first)

    def _run(self, locked: contextlib.ExitStack, is_known: bool, is_first: bool) -> None:
        try:
            reports = self._on_all_ranks(lambda: self._begin(locked, is_known))
            _check_same([each["what"] for each in reports])
            if is_known:
                return
            # From all ranks: an asynchronous algorithm may be in another phase on another rank.
            self._differ = any(each["exchanges"] == Exchanges.WEIGHTS for each in reports)
            own, common = self._collect()
            if is_first:
                self._require_room([own, common])
            checksums = self._write(own, common)
            advice = "Earlier checkpoints are as they were. Start again from the newest one."
            on_all_ranks(self._channel, f"saving step {self._step}", advice, self._refuse_undefined)
            self._on_all_ranks(lambda: self._complete(checksums))
        except BaseException:
            if self._is_rank_0 and self._has_begun:  # otherwise the folder belongs to another save
                shutil.rmtree(self._partial, ignore_errors=True)
            raise
        if self._is_rank_0:
            log.info("step %d is saved: %s", self._step, self._final)
            _prune(self._folder, self._keep)

    def _begin(self, locked: contextlib.ExitStack, is_known: bool) -> dict[str, Any]:
        """Refuse what cannot be saved; rank 0 locks the folder and makes the temporary one."""
        if self._step < 0:
            raise UsageError("a step counts from 0")
        try:
            json.dumps(self._extra)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"extra cannot be written as JSON: {error}. Pass what has a state_dict() by name"
            ) from None
        for name, part in self._parts.items():
            if not callable(getattr(part, "state_dict", None)):
                raise UsageError(f"{name}={type(part).__name__} has no state_dict(). Pass plain values as extra=")
        if self._is_rank_0 and not is_known:
            locked.enter_context(self._lock.writing())
            self._has_begun = True
            latest = max(steps_in(self._folder), default=-1)
            if latest >= self._step:
                raise UsageError(
                    f"the folder holds a checkpoint of step {latest}, which this run neither made nor loaded last and "
                    "which would count as the newest. Load it, remove it, or use another folder"
                )
            for leftover in self._folder.glob(manifests.PARTIALS):
                shutil.rmtree(leftover)
            self._partial.mkdir()
        exchanges = str(self._ddp.algorithm.exchanges)
        return {"what": f"step {self._step} with {list(self._parts)}", "exchanges": exchanges}

    def _collect(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what goes into this rank's own file, and what rank 0 writes for all.

        If replicas differ, every rank writes all of its state. Otherwise rank 0 writes for all ranks, and the others
        write only what differs from it.
        """
        algorithm = self._ddp.algorithm_state_dict()  # first, for it may communicate and write weights
        mine: dict[str, Any] = {}
        digests: dict[str, str] = {}

        def collect() -> dict[str, str]:
            if not self._partial.is_dir():
                raise UsageError(f"it does not see {self._partial}, which rank 0 made: the ranks must share the folder")
            mine["model"] = self._ddp.state_dict()
            mine["parts"] = {name: part.state_dict() for name, part in self._parts.items()}
            if not self._differ and self._channel.world_size > 1:
                digests.update(_digests(mine))
            return digests if self._is_rank_0 else {}

        of_rank_0 = self._on_all_ranks(collect)[0]
        own = {"algorithm": algorithm, "random": random_state(), **mine}
        if self._differ:
            return own, {}
        if self._is_rank_0:
            return {**own, "model": {}, "parts": {}}, mine["parts"]
        for kind, values in mine.items():
            keys = {name: f"{kind} {name}" for name in values}
            own[kind] = {name: values[name] for name, key in keys.items() if digests[key] != of_rank_0.get(key)}
        return own, {}

    def _require_room(self, trees: Any) -> None:
        """Raise if the disk cannot hold `keep` checkpoints and the one being written."""
        own_bytes = num_bytes(trees) + (num_bytes(self._ddp.state_dict()) if self._is_rank_0 else 0)
        total_bytes = sum(self._on_all_ranks(lambda: own_bytes))

        def check() -> None:
            num_more = max(1, self._keep + 1 - len(steps_in(self._folder)))
            free_bytes = shutil.disk_usage(self._folder).free
            if self._is_rank_0 and free_bytes < num_more * total_bytes:
                raise UsageError(
                    f"a checkpoint takes {_size(total_bytes)}, keep={self._keep} needs room for {num_more} more, "
                    f"and {_size(free_bytes)} are free"
                )

        self._on_all_ranks(check)

    def _write(self, own: dict[str, Any], common: dict[str, Any]) -> dict[str, Checksum]:
        """Write this rank's files; model.pt holds the mean of the replicas if they differ."""
        with self._ddp.average_parameters() if self._differ else contextlib.nullcontext():
            checksums = self._write_files({"model.pt": self._ddp.state_dict()} if self._is_rank_0 else {})
        trees = {f"rank-{self._channel.rank}.pt": own}
        if self._is_rank_0 and not self._differ:
            trees["common.pt"] = common
        return checksums | self._write_files(trees)

    def _write_files(self, trees: Mapping[str, dict[str, Any]]) -> dict[str, Checksum]:
        """Write each rank's `trees` by file name, and return the checksums of all ranks' files."""

        def write() -> dict[str, Any]:
            checksums = {name: asdict(write_tensors(self._partial / name, tree)) for name, tree in trees.items()}
            sync_folder(self._partial)
            return checksums

        return {name: Checksum(**each) for files in self._on_all_ranks(write) for name, each in files.items()}

    def _refuse_undefined(self) -> None:
        """Raise if an exchange has failed on a GPU, perhaps when the state had been read: that is undefined then."""
        failed = self._ddp.transport.first_failed()
        try:
            if failed is not None and failed.fails_later:
                failed.check_usable()
        except TransportError as error:  # the channel of checkpoints goes on: all ranks can hear of it
            raise UsageError(str(error)) from error

    def _complete(self, checksums: Mapping[str, Checksum]) -> None:
        """On rank 0: write the manifest and rename the folder, which completes the checkpoint."""
        if not self._is_rank_0:
            return
        manifest = Manifest(
            step=self._step,
            world_size=self._channel.world_size,
            algorithm=manifests.algorithm_name(self._ddp.algorithm),
            replicas="differ" if self._differ else "equal",
            parts=list(self._parts),
            saved_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            torch=torch.__version__,
            extra=self._extra,
            files=dict(sorted(checksums.items())),
        )
        write_text(self._partial / manifests.FILE, manifest.to_json())
        sync_folder(self._partial)
        os.rename(self._partial, self._final)
        sync_folder(self._folder)


def _check_same(saves: list[str]) -> None:
    for rank, each in enumerate(saves):
        if each != saves[0]:
            raise UsageError(f"rank 0 saves {saves[0]}, and rank {rank} {each}. Save the same on every rank.")


def _digests(state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    return {f"{kind} {name}": digest(value) for kind, values in state.items() for name, value in values.items()}


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; each is renamed first, so that a kill leaves no partial one."""
    for step in steps_in(folder)[:-keep]:
        old = folder / folder_name(step)
        try:
            os.rename(old, manifests.partial(old))
            shutil.rmtree(manifests.partial(old))
        except OSError as error:
            log.warning("the old checkpoint %s cannot be removed: %s", old, error)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 2**10:.0f} KiB"
