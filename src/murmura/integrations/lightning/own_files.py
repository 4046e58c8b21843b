"""Each rank's own state, in files beside a checkpoint of Lightning's.

For `folder/name.ckpt` they are `folder/replicas/name.ckpt/<id>-rank-<rank>.pt`. The checkpoint holds the id and is
written after them, so a kill at any moment leaves a checkpoint with its own files. Files are read and written by
Lightning's CheckpointIO, perhaps in an object store, and after the DDP is closed: hence other files than those of
`replica_state`. Functions are collective unless they say otherwise; an error on one rank is a `CheckpointError` on all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem

from murmura.errors import CheckpointError
from murmura.integrations.lightning.common import gather

log = logging.getLogger("murmura")

KEY = "murmura"
"""Where a checkpoint tells of the files beside it."""
FORMAT = 1


def save(io: Any, path: Any, plain: dict[str, Any], own: Mapping[str, Any], *, differ: bool, options: Any) -> None:
    """Write every rank's `own` state, then, on rank 0, `plain` to `path`; remove the own states of an older save.

    Args:
        io: Lightning's CheckpointIO.
        path: where the plain checkpoint goes, rank 0's.
        plain: what any program may load.
        own: what this rank needs beside it.
        differ: whether replicas had weights of their own.
        options: Lightning's storage options.
    """
    shared = gather((os.fspath(path), uuid.uuid4().hex))
    (path, identity), rank = shared[0], _rank()
    plain[KEY] = {"format": FORMAT, "id": identity, "world_size": len(shared), "differ": differ}
    _on_all_ranks(
        f"saving this rank's part of {path}",
        lambda: io.save_checkpoint(dict(own), _own_path(path, identity, rank), storage_options=options),
    )
    _on_all_ranks(f"saving {path}", lambda: rank or io.save_checkpoint(plain, path, storage_options=options))
    _remove_own(path, keep=identity)


def load(io: Any, path: Any, plain: Mapping[str, Any], **options: Any) -> dict[str, Any] | None:
    """What this rank saved beside `plain`; None if murmura did not save it, or the files were not moved along.

    With another number of ranks than at the save, replicas that were equal resume from rank 0's state, without the
    algorithm's. Replicas that differed are refused: the plain file holds their mean.
    """
    about = plain.get(KEY)
    if about is None:
        return None
    if about["format"] != FORMAT:
        raise CheckpointError(
            f"{path} was saved in format {about['format']}, and this version of murmura reads format {FORMAT}. Resume "
            "with the version that saved it."
        )
    rank, same_size = _rank(), about["world_size"] == _world_size()
    own_path = _own_path(os.fspath(path), about["id"], rank if same_size else 0)
    found = gather(bool(get_filesystem(own_path).exists(own_path)))
    if not any(found):
        log.warning(
            "rank %d: %s has no files of the ranks' own states beside it, in replicas/. All ranks go on from the plain "
            "file, and the algorithm starts anew. Copy replicas/ along with a checkpoint to go on where it stopped.",
            *(rank, path),
        )
        return None
    if not all(found):
        missing = [index for index, each in enumerate(found) if not each]
        raise CheckpointError(
            f"loading {path}: ranks {missing} do not find their own state beside it, {own_path} on this rank, and the "
            "others do. Let all ranks see the same folder."
        )
    if about["differ"] and not same_size:
        raise CheckpointError(
            f"{path} was saved by {about['world_size']} ranks, each with weights of its own, and here are "
            f"{_world_size()}. Go on with {about['world_size']} ranks, or remove replicas/ beside the file to begin "
            "with the mean of their weights."
        )
    own: dict[str, Any] = {}
    _on_all_ranks(f"loading {own_path}", lambda: own.update(io.load_checkpoint(own_path, **options)))
    own |= {"same_size": same_size, "path": path}
    return own


def remove(path: Any) -> None:
    """Remove this rank's own state beside `path`. Not collective."""
    _remove_own(os.fspath(path), keep=None)


def _remove_own(path: str, keep: str | None) -> None:
    folder, end = posixpath.split(_own_path(path, "", _rank()))
    files = get_filesystem(folder)
    with contextlib.suppress(OSError):
        for each in files.ls(folder, detail=False):  # no pattern: a folder may be called "lr=[0.1]"
            if each.endswith(end) and (keep is None or not posixpath.basename(each).startswith(keep)):
                files.rm(each)
        if keep is None and os.path.isdir(folder):
            os.rmdir(folder)  # the last rank that removes its file does it


def _own_path(path: str, identity: str, rank: int) -> str:
    resolved = path if "://" in path else os.path.realpath(path)  # last.ckpt may be a link
    folder, name = posixpath.split(resolved)
    return posixpath.join(folder, "replicas", name, f"{identity}-rank-{rank}.pt")


def _on_all_ranks(what: str, work: Callable[[], Any]) -> None:
    """Do `work`; if it fails on any rank, raise on all."""
    problem: BaseException | None = None
    try:
        work()
    except Exception as error:
        problem = error
    told = gather(None if problem is None else f"{type(problem).__name__}: {problem}")
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(told) if each is not None]
    if failed:
        raise CheckpointError(f"{what} failed. {'; '.join(failed)}. Make room, or mend the folder.") from problem


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
