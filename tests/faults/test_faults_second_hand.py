"""News of a failure that come from a rank which is not at fault: the rank at fault is named all the same."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from gloo_acts import GlooWorld
from scenario import Stage, World
from traces import await_state

from murmura import CheckpointError, HierarchicalTransport, InProcessTransport, PeerLost, PeerTimeout
from murmura.transports import group_building, stalls
from murmura.transports.error_reporter import ExitNotice, Reporter
from murmura.transports.failure_log import FailureLog
from murmura.transports.hierarchical import groups
from murmura.transports.liveness import Liveness
from murmura.transports.rendezvous import Roster, file_store
from murmura.transports.shared_memory.control_block import SegmentNotes
from murmura.transports.watched_store import nobody, poll, run_watched

STORY = "raised ValueError: the loader broke"


def come_late(stage: Stage, culprit: int, late: int) -> None:
    stage.transport.barrier()
    if stage.rank == culprit:
        raise ValueError("the loader broke")
    if stage.rank == late:
        stage.hear()
    stage.mark()
    stage.transport.channel("ddp")


def test_a_rank_that_comes_to_a_channel_when_all_others_have_ended_names_the_one_that_raised():
    with GlooWorld(3, come_late, 2, 1) as world:
        world.reports(0, 2)
        for rank in (0, 2):
            assert world.actors[rank].exitcode is not None  # their processes have ended
        world.actors[1].say("go on")
        for report in world.reports(0, 1):
            assert (report.kind, report.rank, report.peer) == ("PeerLost", report.own, 2), report
            assert STORY in report.message


def log_of(path: str, rank: int, liveness: Liveness | None = None) -> FailureLog:
    return FailureLog(file_store(path, 3), rank, 3, liveness or Liveness({}), Reporter(rank, range(3)))


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch):
    """No group is ever built."""
    may_end = threading.Event()
    monkeypatch.setattr(group_building, "group_maker", lambda *_: lambda: may_end.wait(30.0))
    yield
    may_end.set()


def build(path: str, rank: int, pids: dict[int, int], watch=nobody) -> PeerLost:
    roster = Roster(rank, (0, 0, 0), pids, file_store(path, 3), (0, 1, 2), "", ())
    with pytest.raises(PeerLost) as caught:
        group_building.build_group(roster, 3, "gloo", 20.0, Reporter(rank, range(3)), watch)
    return caught.value


def test_a_rank_that_failed_while_it_connected_and_ended_is_not_blamed(tmp_path, never):
    path = str(tmp_path / "store")
    log_of(path, 1).announce_exit(ExitNotice(2, "died", "lost", 1))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert build(path, 0, {1: ended.pid}).peer == 2


def test_a_rank_that_fails_while_it_connects_tells_the_others_why(tmp_path, never):
    path = str(tmp_path / "store")
    heard = ExitNotice(2, STORY, "raised").as_error(1, 2, "split('ddp')")
    assert build(path, 1, {}, watch=lambda: heard).peer == 2
    assert build(path, 0, {}).peer == 2


def test_a_rank_that_fails_while_it_shares_memory_tells_the_other_hosts_why(tmp_path, monkeypatch):
    """Rank 1 cannot; rank 0, on its host, fails for it; the ranks of the other host hear of both."""

    def share_or_fail(across):
        if across.rank == 1:
            raise ValueError("the loader broke")
        if across.rank == 0:
            return wait_for_failure(across)
        both_failed.wait(20.0)
        return wait_for_failure(across)

    def wait_for_failure(across):
        while (error := across.failure_log.cause("the rendezvous")) is None:
            time.sleep(0.001)
        raise error

    def join(rank):
        try:
            HierarchicalTransport.join(file_store(str(tmp_path / "store"), 3), rank, 3, hosts=(0, 0, 1), timeout=20.0)
        except Exception as error:
            return error
        finally:
            if rank < 2:
                both_failed.wait(20.0)

    both_failed = threading.Barrier(3)
    monkeypatch.setattr(groups, "share_memory", share_or_fail)
    with ThreadPoolExecutor(3) as pool:
        raised = list(pool.map(join, range(3)))
    assert isinstance(raised[1], ValueError)
    for rank in (0, 2):
        assert (type(raised[rank]), raised[rank].rank, raised[rank].peer) == (PeerLost, rank, 1)
        assert STORY in str(raised[rank])


def test_of_several_that_do_not_answer_the_one_that_is_stopped_is_at_fault(tmp_path):
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    liveness = Liveness({1: children[0].pid, 2: children[1].pid})
    try:
        children[1].send_signal(signal.SIGSTOP)
        await_state(children[1].pid, "T")
        failure_log = log_of(str(tmp_path / "store"), 0, liveness)
        error = failure_log.explain("barrier()", "barrier #1", 0.0, awaited=[1, 2], timed_out=True, told="")
        assert (type(error), error.peer) == (PeerTimeout, 2)
    finally:
        liveness.close()
        for child in children:
            child.kill()
            child.communicate()


def wait_in_a_chain(stage: Stage) -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is busy with something else."""
    if stage.rank == 2:
        stage.hear()
        return
    if stage.rank == 0:
        stage.hear()
        stage.transport.recv(torch.zeros(1), 1, timeout=1.0)
    else:
        stage.tell("waits")
        stage.transport.recv(torch.zeros(1), 2)


def test_whoever_waits_for_a_rank_that_waits_itself_names_the_last_of_them():
    with World("processes", 3, wait_in_a_chain) as world:
        world.await_word("waits", 1)
        await_state(world.actors[1].pid, "S")
        world.actors[0].say("go on")
        (report,) = world.reports(0)
        assert (report.kind, report.rank, report.peer) == ("PeerTimeout", 0, 2), report
        world.actors[2].say("go on")
        world.reports()


def test_what_is_said_between_two_looks_comes_before_the_end_of_who_said_it():
    said = []

    def watch() -> PeerLost:
        said.append("it is over")
        return Reporter(0, range(2)).lost(1, "the rendezvous")

    assert poll(lambda: bool(said), 20.0, watch)


def test_a_connection_that_the_living_still_make_is_made():
    """Whoever broke it off at once would leave the others in torch until their deadline."""
    failed, broken_off = threading.Event(), threading.Event()
    outcome = []

    def connect() -> None:
        failed.wait(20.0)
        time.sleep(0.05)  # as long as a handshake may take
        outcome.append("broken off" if broken_off.is_set() else "made")

    def watch() -> PeerLost | None:
        if not outcome and threading.active_count() > before:
            failed.set()
            return Reporter(0, range(3)).lost(2, "the rendezvous")
        return None

    before = threading.active_count()
    with pytest.raises(PeerLost):
        run_watched(connect, 20.0, watch)
    broken_off.set()
    assert outcome == ["made"]


def test_looking_for_failures_costs_one_question_as_long_as_there_is_none(tmp_path):
    class Counting:
        def __init__(self):
            self.inner, self.num_questions = file_store(str(tmp_path / "store"), 3), 0

        def __getattr__(self, name):
            self.num_questions += 1
            return getattr(self.inner, name)

    store = Counting()
    failure_log = FailureLog(store, 0, 100, Liveness({}), Reporter(0, range(100)))
    assert failure_log.cause("barrier #1") is None
    assert store.num_questions == 1


def test_a_checkpoint_that_failed_on_one_rank_is_its_failure_whoever_tells():
    error = CheckpointError("saving failed on rank 0: no space", rank=0)
    heard = ExitNotice.of(error, 2).as_error(1, 2, "all_gather #2")
    assert (type(heard), heard.rank, heard.peer) == (PeerLost, 1, 0)
    assert "no space" in str(heard)


# Stall notes of a rank that went on


def notes_in(kind: str, path: str):
    """Two ends of the notes of a world: of rank 1, which tells, and of rank 0, which reads."""
    if kind == "threads":
        transports = InProcessTransport.create_group(3)
        return transports[1]._notes, transports[0]._notes
    if kind == "store":
        return log_of(path, 1).notes, log_of(path, 0).notes
    words = [0] * 300
    return tuple(SegmentNotes(SimpleNamespace(words=words, at=[0, 100, 200], own=100 * rank)) for rank in (1, 0))


@pytest.mark.parametrize("kind", ["threads", "store", "segment"])
def test_a_stall_note_is_forgotten_after_a_while(kind, tmp_path, monkeypatch):
    teller, reader = notes_in(kind, str(tmp_path / "store"))
    assert list(reader.awaited_by(1)) == []
    teller.tell([2])
    assert list(reader.awaited_by(1)) == [2]
    monkeypatch.setattr(stalls, "NOTE_SECONDS", -1.0)
    assert list(reader.awaited_by(1)) == []
    monkeypatch.undo()
    teller.tell([])
    assert list(reader.awaited_by(1)) == []


@pytest.mark.parametrize(("told", "awaited"), [('[NOW, 2, "3", null, 4.0, true]', [2]), ('["NOW", 2]', []), ("{", [])])
def test_a_stall_note_that_no_rank_has_written_is_read_as_far_as_it_says_something(told, awaited, tmp_path):
    """Whoever reaches the store can write there."""
    failure_log = log_of(str(tmp_path / "store"), 0)
    failure_log._set("waits/1", told.replace("NOW", repr(time.time())).encode())
    assert list(failure_log.notes.awaited_by(1)) == awaited


def test_a_rank_that_caught_a_timeout_and_went_on_is_blamed_if_it_then_does_not_come(monkeypatch):
    monkeypatch.setattr(stalls, "NOTE_SECONDS", 0.2)
    transports = InProcessTransport.create_group(3, timeout=20.0)
    ended = threading.Event()

    def program(transport):
        one, two = transport.channel("one"), transport.channel("two")
        transport.barrier()
        if transport.rank == 1:
            with pytest.raises(PeerTimeout):
                one.recv(torch.zeros(1), 0, timeout=0.01)
        transport.barrier()
        if transport.rank < 2:
            ended.wait(20.0)
            return None
        try:
            two.recv(torch.zeros(1), 1, timeout=0.3)
        except PeerTimeout as error:
            return error
        finally:
            ended.set()

    with ThreadPoolExecutor(3) as pool:
        error = list(pool.map(program, transports))[2]
    assert (error.rank, error.peer) == (2, 1)
