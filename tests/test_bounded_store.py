"""Questions to a store that does not answer: they end, cost no thread each, and nothing that was said is lost."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from murmura.transports import bounded_store
from murmura.transports.bounded_store import BoundedStore, StoreSilent
from murmura.transports.rendezvous import bounded, file_store, sign_in, under
from murmura.transports.signed_store import SignedStore
from murmura.transports.watched_store import WatchedStore, nobody

LIMIT = 0.2  # seconds that a question may take where the store is stopped


class Stoppable:
    """A store in a dictionary; while it is stopped its questions wait."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.num_questions = 0
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _answer(self) -> dict[str, Any]:
        self.num_questions += 1
        assert self.goes_on.wait(30.0)
        return self.values

    def set(self, key: str, value: bytes) -> None:
        self._answer()[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self._answer() for key in keys)

    def get(self, key: str) -> bytes:
        return bytes(self._answer()[key])


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_store, "ANSWER_SECONDS", LIMIT)


@pytest.fixture
def inner() -> Iterator[Stoppable]:
    store = Stoppable()
    yield store
    store.goes_on.set()  # its thread ends


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "murmura-store"]


def test_a_store_that_answers_is_as_it_was(tmp_path: Path) -> None:
    plain = file_store(str(tmp_path / "store"), 1)
    store = under(bounded(plain), "part")
    store.set("key", b"value")
    assert (store.check(["key"]), store.check(["key", "other"])) == (True, False)
    assert (store.get("key"), plain.get("part/key")) == (b"value", b"value")
    assert store.add("counter", 2) == 2
    assert store.compare_set("key", "value", "changed") == b"changed"
    assert store.delete_key("key")
    assert not store.is_silent


def test_what_nobody_has_set_is_not_waited_for(tmp_path: Path) -> None:
    store = bounded(file_store(str(tmp_path / "store"), 1))
    with pytest.raises(dist.DistStoreError, match="nobody has set key"):
        store.get("key")


def test_only_the_first_question_waits_for_a_store_that_does_not_answer(
    inner: Stoppable, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BoundedStore(inner)
    inner.set("key", b"value")
    inner.goes_on.clear()
    assert not store.check(["key"])
    num_questions = inner.num_questions
    waits: list[float] = []
    monkeypatch.setattr(bounded_store.Ticket, "await_end", lambda ticket, seconds: waits.append(seconds))
    for _ in range(100):
        assert store.is_silent
        assert not store.check(["key"])
        with pytest.raises(StoreSilent, match="has not answered"):
            store.get("key")
        store.set("word", b"said")
    assert waits == []
    assert inner.num_questions == num_questions
    assert len(threads()) == 1


def test_a_store_that_answers_again_is_asked_again_and_hears_what_was_said(inner: Stoppable, soon: None) -> None:
    store = BoundedStore(inner)
    inner.goes_on.clear()
    store.set("first", b"1")
    store.set("second", b"2")
    inner.goes_on.set()
    give_up = time.monotonic() + 10.0
    while store.is_silent:
        assert time.monotonic() < give_up
    assert (store.get("first"), store.get("second")) == (b"1", b"2")


@pytest.mark.parametrize("secret", [None, "swordfish"])
def test_a_store_and_its_parts_ask_with_one_thread(
    inner: Stoppable, secret: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = file_store(str(tmp_path / "store"), 1)
    store = bounded(SignedStore(plain, secret, "job") if secret else plain)
    parts = [under(under(bounded(store), "world"), f"split/{number}") for number in range(3)]
    for part in parts:
        part.set("key", b"value")
        assert part.get("key") == b"value"
    assert len(threads()) == 1
    asked = threading.Thread(target=lambda: store.check(["key"]))
    plain_check, store_of_all = inner.goes_on, store._inner if secret else store
    plain_check.clear()
    store_of_all._inner = inner  # the server is stopped
    monkeypatch.setattr(bounded_store, "ANSWER_SECONDS", LIMIT)
    asked.start()
    asked.join()
    assert all(part.is_silent and not part.check(["key"]) for part in (store, *parts))


def test_an_error_of_the_store_is_that_of_the_question(inner: Stoppable) -> None:
    store = BoundedStore(inner)
    with pytest.raises(AttributeError):
        store.add("counter", 1)
    inner.values = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        store.set("key", b"value")


def test_the_thread_ends_with_the_store(inner: Stoppable) -> None:
    store = BoundedStore(inner)
    assert not store.check(["key"])
    (thread,) = threads()
    del store
    thread.join(10.0)
    assert not thread.is_alive()


def test_the_thread_ends_with_a_store_that_raised_an_error(inner: Stoppable) -> None:
    store = BoundedStore(inner)
    gc.disable()
    try:
        with pytest.raises(AttributeError):
            store.add("counter", 1)
        (thread,) = threads()
        del store
        thread.join(10.0)
        assert not thread.is_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("slow", ["get", "check"])
def test_ranks_sign_in_by_a_store_that_is_slow(slow: str, soon: None, tmp_path: Path) -> None:
    """One answer takes longer than is waited for: the question is asked again."""

    class Slow(dist.Store):  # type: ignore[misc, name-defined]
        """A store whose first answer of one kind comes late."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self._inner: Any = file_store(str(tmp_path / "store"), 2)
            self._late = rank == 1

        def _be_late(self, kind: str) -> None:
            if kind == slow and self._late:
                self._late = False
                time.sleep(2 * LIMIT)

        def set(self, key: str, value: bytes) -> None:
            self._inner.set(key, value)

        def check(self, keys: list[str]) -> bool:
            self._be_late("check")
            return bool(self._inner.check(keys))

        def get(self, key: str) -> bytes:
            self._be_late("get")
            return bytes(self._inner.get(key))

    rosters: list[Any] = [None, None]
    waited = WatchedStore(bounded(Slow(1)), 20.0, nobody)

    def come(rank: int) -> None:
        rosters[rank] = sign_in(bounded(Slow(rank)), rank, 2, 20.0)

    ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [roster.rank for roster in rosters] == [0, 1]
    waited.set("word", b"said")
    assert waited.get("word") == b"said"


def test_a_forked_child_leaves_the_store_to_its_parent(inner: Stoppable) -> None:
    store = BoundedStore(inner)
    store.set("key", b"value")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.get("key")
        except StoreSilent:
            os.write(writer, b"refused")
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 10) == b"refused"
    os.close(reader)
    os.waitpid(child, 0)
    assert store.get("key") == b"value"


PROGRAM = """
import os, signal, time
import torch.distributed as dist
from murmura.transports import bounded_store
from murmura.transports.rendezvous import bounded

reader, writer = os.pipe()
server = os.fork()
if server == 0:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    signal.pause()

class AtTheVeryEnd:
    def __del__(self, os=os, time=time, server=server):  # Python finalizes: no thread may take the GIL any more
        os.kill(server, 9)
        os.waitpid(server, 0)
        time.sleep(0.3)  # whatever waits for the server is told that it is gone
        os.write(1, b"ended")

bounded_store.ANSWER_SECONDS = 0.2
store = bounded(dist.TCPStore("127.0.0.1", int(os.read(reader, 9)), 1, False, wait_for_workers=False))
store.set("key", b"value")
os.kill(server, signal.SIGSTOP)
os.waitpid(server, os.WUNTRACED)
assert not store.check(["key"]) and store.is_silent
at_the_very_end = AtTheVeryEnd()
"""


def test_a_program_ends_well_if_the_server_goes_while_it_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, timeout=60.0)
    assert (ended.returncode, ended.stdout) == (0, b"ended")
