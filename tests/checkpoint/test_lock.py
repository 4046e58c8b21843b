"""One job at a time saves into a folder; the next may when that one has ended, however it did."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.programs import checkpoints_in
from ddp.models import weight
from murmura import DDP, Checkpointer, CheckpointError, InProcessTransport
from murmura.checkpoint import lock, saving


def save(folder: Path, step: int) -> Checkpointer:
    """As a world of one; the folder is its own as long as the result is kept."""
    (transport,) = InProcessTransport.create_group(1)
    checkpointer = Checkpointer(folder)
    with transport:
        checkpointer.save(step, ddp=DDP(weight(float(step)), transport))
    return checkpointer


def load(folder: Path) -> float:
    (transport,) = InProcessTransport.create_group(1)
    with transport:
        ddp = DDP(weight(-1.0), transport)
        Checkpointer(folder).load(ddp=ddp)
        return float(ddp.module.weight.item())


def hold(folder: Path, pipe: Any, has_worker: bool) -> None:
    """A job that has saved step 1, and may save again: it waits until it is killed, and so does its worker."""
    os.environ["MURMURA_JOB_ID"] = "job-of-the-night"
    checkpointer = save(folder, 1)
    if has_worker and os.fork() == 0:
        pipe.send(os.getpid())
        signal.pause()
    if not has_worker:
        pipe.send(None)
    signal.pause()
    del checkpointer


@contextlib.contextmanager
def another_job(folder: Path, *, has_worker: bool = False) -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(folder, theirs, has_worker))
    process.start()
    theirs.close()
    worker = None
    try:
        worker = ours.recv()
        yield process
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
        if worker is not None:
            os.kill(worker, signal.SIGKILL)


def test_a_second_job_is_refused_and_told_whose_folder_it_is(tmp_path: Path) -> None:
    with another_job(tmp_path) as other:
        (tmp_path / ".step-000000002.partial").mkdir()  # what the other is just writing
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 2)
        assert (
            "failed on rank 0: another job writes into this folder: "
            f"process {other.pid} on {platform.node()}, job job-of-the-night. Give each job a folder of its own"
        ) in str(caught.value)
        assert checkpoints_in(tmp_path) == [".step-000000002.partial", "step-000000001"]
        assert load(tmp_path) == 1.0


@pytest.mark.parametrize("has_worker", [False, True], ids=["alone", "with a worker that outlives it"])
def test_a_killed_job_leaves_no_lock(tmp_path: Path, has_worker: bool) -> None:
    with another_job(tmp_path, has_worker=has_worker) as other:
        other.kill()
        other.join()
        save(tmp_path, 2)
    assert load(tmp_path) == 2.0


def save_and_exit(folder: Path) -> None:
    held: list[Any] = [save(folder, 1)]
    held.append(held)  # a cycle, as tracebacks make them: only a collection would end it
    sys.exit(7)


def test_a_child_process_that_exits_leaves_no_file(tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=save_and_exit, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert os.listdir(tmp_path) == ["step-000000001"]


def test_a_fork_that_ends_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    held = save(tmp_path, 1)
    worker = multiprocessing.get_context("fork").Process(target=sys.exit)
    worker.start()
    worker.join()
    assert (tmp_path / lock.FILE).exists()
    del held
    assert not (tmp_path / lock.FILE).exists()


def test_the_lock_goes_with_its_checkpointer_and_is_shared_in_a_process(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert (tmp_path / lock.FILE).exists()
    del first
    assert (tmp_path / lock.FILE).exists()
    del second
    assert os.listdir(tmp_path) != []
    assert not (tmp_path / lock.FILE).exists()


def test_two_worlds_of_one_process_do_not_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, may_go_on = threading.Event(), threading.Event()
    write = saving.write_tensors

    def slow(path: Path, tree: dict[str, Any]) -> Any:
        writing.set()
        assert may_go_on.wait(20)
        return write(path, tree)

    monkeypatch.setattr(saving, "write_tensors", slow)
    world = threading.Thread(target=save, args=(tmp_path, 1))
    world.start()
    try:
        assert writing.wait(20)
        with pytest.raises(CheckpointError, match="another world of this process is saving into the folder"):
            save(tmp_path, 2)
    finally:
        may_go_on.set()
        world.join()
    assert load(tmp_path) == 1.0


@pytest.mark.parametrize("system", ["no fcntl", "no flock"])
def test_where_there_are_no_locks_saving_works_and_says_so(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if system == "no fcntl":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    save(tmp_path, 1)
    assert load(tmp_path) == 1.0
    assert f"{tmp_path} cannot be locked" in caplog.text
    assert checkpoints_in(tmp_path) == os.listdir(tmp_path)


def test_a_lock_that_its_holder_removed_meanwhile_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, calls = lock.fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / lock.FILE).unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    held = save(tmp_path, 1)
    assert len(calls) == 2
    assert (tmp_path / lock.FILE).exists()
    del held
