"""Disks that are full, folders that are not there, files that are damaged: one error, the same on every rank."""

from __future__ import annotations

import builtins
import json
import os
import re
import shutil
import threading
import traceback
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoint.programs import checkpoints_in
from ddp.models import errors_on, on_ranks, weight
from murmura import DDP, Checkpointer, CheckpointError, ConfigError, LocalSGDAlgorithm, Transport
from murmura.checkpoint import files, manifest
from murmura.checkpoint.files import Checksum


def save(transport: Transport, folder: Path, *steps: int, algorithm: Any = None, keep: int = 3) -> None:
    checkpointer = Checkpointer(folder, keep)
    for step in steps:
        checkpointer.save(step, ddp=DDP(weight(step), transport, algorithm=algorithm))


def load(transport: Transport, folder: Path, step: int | None = None, algorithm: Any = None) -> float:
    ddp = DDP(weight(-1.0), transport, algorithm=algorithm)
    Checkpointer(folder).load(ddp=ddp, step=step)
    return ddp.module.weight.item()


def on_thread_of(rank: int) -> bool:
    return threading.current_thread().name == f"murmura-rank{rank}"


# Writing


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("algorithm", [None, LocalSGDAlgorithm(2)], ids=["equal", "differ"])
def test_a_full_disk(culprit: int, algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = threading.Event()
    fault.set()

    def full(path: Path, mode: str, **options: Any) -> Any:
        path = Path("/dev/full") if fault.is_set() and on_thread_of(culprit) and "w" in mode else path
        return builtins.open(path, mode, **options)

    def visit(transport: Transport) -> list[float]:
        ddp = DDP(weight(1.0), transport, algorithm=algorithm)
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save(1, ddp=ddp)
        transport.barrier()
        monkeypatch.setattr(files, "open", full, raising=False)
        torch.nn.init.constant_(ddp.module.weight, 2.0 + transport.rank)
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(2, ddp=ddp)
        assert caught.value.rank == culprit
        story = str(caught.value)
        assert f"saving step 2 to {tmp_path} failed on rank {culprit}: No space left on device ({tmp_path}/" in story
        assert story.endswith("Make room, or mend the folder, and save.")
        assert ddp.module.weight.item() == 2.0 + transport.rank  # not the mean
        transport.barrier()
        assert checkpoints_in(tmp_path) == ["step-000000001"]
        before = load(transport, tmp_path, algorithm=algorithm)
        transport.barrier()
        fault.clear()
        checkpointer.save(2, ddp=ddp)
        return [before, load(transport, tmp_path, algorithm=algorithm)]

    found = on_ranks(visit, 2)
    assert found == [[1.0, 2.0], [1.0, 3.0]]


class Loader:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 2:
            raise ValueError("the loader broke")
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is loaded")


def test_a_subgroup_that_fails_to_save_names_the_rank_of_the_world(tmp_path: Path) -> None:
    def run(transport: Transport) -> CheckpointError | None:
        group = transport.subgroup([2, 1])
        if group is None:
            return None
        with pytest.raises(CheckpointError, match="failed on rank 2: ") as caught:
            Checkpointer(tmp_path).save(1, ddp=DDP(weight(1.0), group), loader=Loader(transport.rank))
        return caught.value

    errors = on_ranks(run, 3)
    assert [error and error.rank for error in errors] == [None, 2, 2]


def test_too_little_room_is_found_at_the_first_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 60_000))  # random states take 10 KB a rank
    for error in errors_on(save, 2, tmp_path, 1):
        assert isinstance(error, CheckpointError)
        assert "keep=3 needs room for 4 more" in str(error)
    assert checkpoints_in(tmp_path) == []
    on_ranks(lambda transport: save(transport, tmp_path, 1, 2, keep=1), 2)


def test_a_folder_that_cannot_be_written_is_refused_at_construction(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/murmura")):
        with pytest.raises(ConfigError, match=rf"cannot be written to {folder}: .*\. Give a folder"):
            Checkpointer(folder)


@pytest.mark.parametrize("keep", [0, -1, 2.5, 1.0, float("nan"), float("inf"), True, None, "3"])
def test_a_number_of_checkpoints_that_is_none_is_refused(keep: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"keep={keep!r}: ")):
        Checkpointer(tmp_path, keep=keep)
    assert Checkpointer(tmp_path, keep=np.int64(2)).keep == 2


@pytest.mark.parametrize("folder", ["", None, 7, b""])
def test_a_folder_without_a_name_is_refused(folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"folder={folder!r}: give the path")):
        Checkpointer(folder)


def test_looking_whether_a_folder_can_be_written_leaves_nothing_at_any_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        seen.append(os.listdir(tmp_path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    Checkpointer(tmp_path)
    assert seen == [[]]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        Checkpointer(tmp_path)


def test_ranks_that_do_not_share_the_folder(tmp_path: Path) -> None:
    for error in errors_on(lambda transport: save(transport, tmp_path / str(transport.rank), 1), 2):
        assert isinstance(error, CheckpointError)
        assert "rank 1: it does not see" in str(error)
        assert "share the folder" in str(error)


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if target == manifest.partial(source):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    on_ranks(lambda transport: save(transport, tmp_path, 1, 2, keep=1), 2)
    assert on_ranks(load, 2, tmp_path) == [2.0, 2.0]
    assert "step-000000001 cannot be removed" in caplog.text


# Reading


def test_a_state_that_the_algorithm_refuses_changes_nothing(tmp_path: Path) -> None:
    on_ranks(lambda transport: save(transport, tmp_path, 2, algorithm="diloco:interval=2:compressor=topk"), 2)

    def attempt(transport: Transport) -> float:
        ddp = DDP(weight(-1.0), transport, algorithm="diloco:interval=2")
        with pytest.raises(CheckpointError, match=r"compressor=None cannot load the .*Nothing was changed"):
            Checkpointer(tmp_path).load(ddp=ddp)
        return ddp.module.weight.item()

    assert on_ranks(attempt, 2) == [-1.0, -1.0]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["model.pt", "common.pt", "rank-1.pt"])
@pytest.mark.parametrize("damage", [flip_a_bit, cut_off, Path.unlink])
def test_a_damaged_file_is_found_before_anything_is_changed(name: str, damage: Any, tmp_path: Path) -> None:
    on_ranks(lambda transport: save(transport, tmp_path, 1, 2), 2)
    path = tmp_path / "step-000000002" / name
    damage(path)

    def attempt(transport: Transport) -> None:
        ddp = DDP(weight(-1.0), transport)
        try:
            Checkpointer(tmp_path).load(ddp=ddp)
        finally:
            assert ddp.module.weight.item() == -1.0

    for error in errors_on(attempt, 2):
        assert isinstance(error, CheckpointError)
        assert error.rank == (1 if name == "rank-1.pt" else 0)
        assert str(path) in str(error)
        assert "There are also steps [1]: load(step=...)" in str(error)
    assert on_ranks(load, 2, tmp_path, 1) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is damaged"), ("[]", "is damaged"), ('{"format": 1}', "is damaged"), ('{"format": 2}', "has format 2")],
)
def test_a_damaged_manifest(text: str, words: str, tmp_path: Path) -> None:
    on_ranks(lambda transport: save(transport, tmp_path, 1), 2)
    (tmp_path / "step-000000001" / "manifest.json").write_text(text)
    for error in errors_on(load, 2, tmp_path):
        assert isinstance(error, CheckpointError)
        assert re.search(f"manifest.json {words}", str(error))


def test_a_manifest_in_another_folder_or_without_a_file(tmp_path: Path) -> None:
    on_ranks(lambda transport: save(transport, tmp_path, 1), 2)
    path = (tmp_path / "step-000000001").rename(tmp_path / "step-000000002") / "manifest.json"
    assert all("is of step 1" in str(error) for error in errors_on(load, 2, tmp_path))
    told = json.loads(path.read_text())
    del told["files"]["model.pt"]
    path.write_text(json.dumps({**told, "step": 2}))
    assert all("does not name model.pt" in str(error) for error in errors_on(load, 2, tmp_path))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (["random", "torch"], "The state of this run is undefined"),
        (["parts"], r"rank-1.pt has no 'parts'.*Nothing was changed"),
        (["algorithm", "plan"], "this state has no 'plan'.*Nothing was changed"),
    ],
)
def test_a_state_that_fits_on_one_rank_only_is_an_error_on_all(path: list[str], told: str, tmp_path: Path) -> None:
    on_ranks(lambda transport: save(transport, tmp_path, 1), 2)
    folder = tmp_path / "step-000000001"
    own = place = torch.load(folder / "rank-1.pt", weights_only=True)
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["rank-1.pt"] = asdict(files.write_tensors(folder / "rank-1.pt", own))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for error in errors_on(load, 2, tmp_path):
        assert isinstance(error, CheckpointError)
        assert error.rank == 1
        assert re.search(told, str(error))


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(lambda transport: save(transport, tmp_path, 1), 1)
    folder = tmp_path / "step-000000001"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", lambda *args, **options: None)
        own = files.write_tensors(folder / "rank-0.pt", {"algorithm": Evil(), "model": {}, "parts": {}})
    told = json.loads((folder / "manifest.json").read_text())
    told["files"]["rank-0.pt"] = {"sha256": own.sha256, "num_bytes": own.num_bytes}
    (folder / "manifest.json").write_text(json.dumps(told))
    files.verify_checksum(folder / "rank-0.pt", Checksum(**told["files"]["rank-0.pt"]))
    monkeypatch.chdir(tmp_path)
    (error,) = errors_on(load, 1, tmp_path)
    assert isinstance(error, CheckpointError)
    assert re.search(r"rank-0.pt holds a \S*system, and only tensors and plain values are read", str(error))
    story = "".join(traceback.format_exception(error)).lower()
    assert not [word for word in ("weights only", "arbitrary code", "unpicklingerror") if word in story]
    assert not (tmp_path / "evil").exists()
