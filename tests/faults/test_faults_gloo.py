"""The same faults on Gloo, which names neither ranks nor causes: ranks as processes, real signals, real sockets."""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

import gloo_acts
import pytest
from acts import be_interrupted, operate_until, reduce_until
from expect import (
    AT_ONCE_SECONDS,
    DEATH_SECONDS,
    PROMPT_SECONDS,
    SLACK_SECONDS,
    expect_lost,
    expect_mismatch,
)
from gloo_acts import NUMEL, GlooWorld, come_late, fail_as, split_when_told
from scenario import NUM_HEALTHY, Report
from traces import await_state

from murmura import CollectiveMismatch, PeerLost, PeerTimeout, run_world
from murmura.transports.bounded_store import ANSWER_SECONDS, SILENCE
from murmura.transports.failure_log import roll_call_seconds

CULPRIT = 1
OTHERS = (0, 2)
TIMEOUT = 1.0  # of what must time out
CALL = f"all_reduce(sum) of float32[{NUMEL}]"

every_check = pytest.mark.parametrize("check", ["best_effort", pytest.param("always", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    """Where the library puts its store; nothing of it is left after a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


# What each rank says


@every_check
@pytest.mark.parametrize("moment", ["be_absent", "go_on"])
@pytest.mark.parametrize("payload", ["prepared", "staged"])
def test_every_rank_names_a_killed_rank_within_two_seconds(payload, moment, check):
    with GlooWorld(3, reduce_until, payload, moment, CULPRIT, check=check) as world:
        world.await_word("ready", *OTHERS)
        world.await_word("fault", CULPRIT)
        killed = world.kill(CULPRIT)
        for report in world.reports(*OTHERS):
            expect_lost(report, CULPRIT, number=NUM_HEALTHY + 1 if moment == "be_absent" else None)
            assert "killed" in report.message
            assert report.ended - killed < DEATH_SECONDS


@pytest.mark.parametrize(
    ("payload", "moment", "check"),
    [
        ("prepared", "be_absent", "best_effort"),
        pytest.param("staged", "go_on", "best_effort", marks=pytest.mark.slow),
        pytest.param("staged", "be_absent", "always", marks=pytest.mark.slow),
        pytest.param("prepared", "go_on", "always", marks=pytest.mark.slow),
    ],
)
def test_every_rank_gives_up_on_a_stopped_rank_at_its_deadline(payload, moment, check):
    with GlooWorld(3, reduce_until, payload, moment, CULPRIT, timeout=TIMEOUT, check=check) as world:
        world.await_word("ready", *OTHERS)
        world.await_word("fault", CULPRIT)
        world.stop(CULPRIT)
        for report in world.reports(*OTHERS):
            _expect_timeout(report, CULPRIT)


@pytest.mark.parametrize("moment", ["be_absent", pytest.param("go_on", marks=pytest.mark.slow)])
def test_every_rank_gives_up_at_its_deadline_also_on_the_rank_that_serves_the_store(moment):
    with GlooWorld(3, reduce_until, "prepared", moment, 0, timeout=TIMEOUT, served=True) as world:
        world.await_word("ready", 1, 2)
        world.await_word("fault", 0)
        world.stop(0)
        for report in world.reports(1, 2):
            _expect_timeout(report, 0, more=ANSWER_SECONDS)
            assert SILENCE in report.message.lower()


def test_a_split_ends_at_its_deadline_if_the_rank_that_serves_the_store_is_stopped():
    with GlooWorld(3, split_when_told, 0, timeout=TIMEOUT, served=True) as world:
        world.await_word("fault", 0)
        world.stop(0)
        for rank in (1, 2):
            world.actors[rank].say("go on")
        for report in world.reports(1, 2):
            assert report.kind == "PeerTimeout", report
            assert TIMEOUT <= report.waited < TIMEOUT + ANSWER_SECONDS + SLACK_SECONDS


def test_a_rank_that_comes_back_learns_that_the_others_gave_up_on_it():
    with GlooWorld(3, reduce_until, "prepared", "go_on", CULPRIT, timeout=TIMEOUT) as world:
        world.await_word("ready", *OTHERS)
        world.await_word("fault", CULPRIT)
        world.stop(CULPRIT)
        for report in world.reports(*OTHERS):
            _expect_timeout(report, CULPRIT)
        resumed = world.actors[CULPRIT].signal(signal.SIGCONT)
        (report,) = world.reports(CULPRIT)
        assert report.kind == "PeerLost"
        assert report.peer in OTHERS
        assert "raised PeerTimeout" in report.message
        assert report.ended - resumed < PROMPT_SECONDS


@every_check
@pytest.mark.parametrize("payload", ["prepared", pytest.param("staged", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "story"),
    [
        ("raise_error", "rank 1 raised ValueError: the loader broke"),
        pytest.param("raise_long_story", "rank 1 raised ValueError: the loader broke: ĝŝ", marks=pytest.mark.slow),
        pytest.param("raise_without_words", "rank 1 raised Speechless", marks=pytest.mark.slow),
        ("return_early", "rank 1 closed its transport and left"),
        ("close_and_stay", "rank 1 closed its transport and left"),
        ("sys_exit", "rank 1 raised SystemExit: 7"),
        ("sys_exit_unclosed", "rank 1 died: it was killed, or exited without closing"),
        ("os_exit", "rank 1 died: it was killed, or exited without closing"),
    ],
)
def test_every_rank_names_the_rank_that_left_and_why(fault, story, payload, check):
    with GlooWorld(3, reduce_until, payload, fault, CULPRIT, check=check) as world:
        for report in world.reports(*OTHERS):
            expect_lost(report, CULPRIT, number=NUM_HEALTHY + 1)
            assert story in report.message
            assert report.waited < PROMPT_SECONDS


def test_the_rank_at_fault_is_named_also_when_all_that_followed_it_have_ended():
    with GlooWorld(3, come_late, CULPRIT, 2) as world:
        world.await_word("late", 2)
        expect_lost(world.actors[0].report(), CULPRIT, number=NUM_HEALTHY + 1)
        assert [world.actors[rank].exitcode for rank in (0, 1)] == [0, 0]
        world.actors[2].say("go on")
        (report,) = world.reports(2)
        expect_lost(report, CULPRIT, number=NUM_HEALTHY + 1)
        assert "rank 1 raised ValueError: the loader broke" in report.message


@pytest.mark.slow
@pytest.mark.parametrize("repetition", range(10))
def test_the_rank_at_fault_is_named_whichever_of_the_others_goes_first(repetition):
    """Those that only follow are gone too, at times before their peers look who is at fault."""
    with GlooWorld(4, reduce_until, "staged", "raise_error", 2) as world:
        for report in world.reports(0, 1, 3):
            expect_lost(report, 2)
            assert "the loader broke" in report.message


@pytest.mark.parametrize("operation", ["small async all_reduce", "staged broadcast", "small ring", "all_gather"])
def test_other_operations_name_the_lost_rank_too(operation):
    with GlooWorld(3, operate_until, operation, "be_absent", CULPRIT) as world:
        world.await_word("ready", *OTHERS)
        world.await_word("fault", CULPRIT)
        killed = world.kill(CULPRIT)
        for report in world.reports(*OTHERS):
            # A rank that does not wait for the dead one itself learns of it from the one that did.
            assert (report.kind, report.rank, report.peer) == ("PeerLost", report.own, CULPRIT), report
            assert "killed" in report.message
            assert report.ended - killed < DEATH_SECONDS
            _expect_poisoned(report)


# Ranks that disagree

_SILENT = {"call_broadcast": f"broadcast(src=0) of float32[{NUMEL}]", "call_all_gather": "all_gather() of float32[*]"}
_COMPARED = {
    **_SILENT,
    "call_barrier": "barrier()",
    "pass_other_length": f"all_reduce(sum) of float32[{NUMEL + 1}]",
    "pass_other_dtype": f"all_reduce(sum) of int32[{NUMEL}]",
    "pass_other_shape": f"all_reduce(sum) of float32[2, {NUMEL // 2}]",
    "pass_other_op": f"all_reduce(max) of float32[{NUMEL}]",
}


@pytest.mark.parametrize("fault", _SILENT)
def test_ranks_that_call_something_else_compare_notes_at_the_deadline(fault):
    with GlooWorld(3, reduce_until, "prepared", fault, CULPRIT, timeout=TIMEOUT) as world:
        for report in world.reports():
            expect_mismatch(report, {0: CALL, 1: _SILENT[fault], 2: CALL})
            assert TIMEOUT <= report.waited < TIMEOUT + roll_call_seconds(TIMEOUT) + SLACK_SECONDS


@pytest.mark.parametrize("fault", _COMPARED)
def test_ranks_that_always_compare_know_the_table_at_once(fault):
    with GlooWorld(3, reduce_until, "prepared", fault, CULPRIT, check="always") as world:
        for report in world.reports():
            expect_mismatch(report, {0: CALL, 1: _COMPARED[fault], 2: CALL})
            assert report.waited < PROMPT_SECONDS


def test_a_message_against_a_collective_is_in_every_table_as_it_was_called():
    with GlooWorld(3, reduce_until, "prepared", "call_recv", CULPRIT, timeout=TIMEOUT, check="always") as world:
        for report in world.reports():
            assert report.kind == "CollectiveMismatch", report
            assert report.calls[1].endswith(f"recv(src=2) of float32[{NUMEL}]")
            assert report.calls[2] == CALL
            assert report.waited < TIMEOUT + roll_call_seconds(TIMEOUT) + SLACK_SECONDS
            _expect_poisoned(report)


# Interrupts


@pytest.mark.parametrize("operation", ["barrier", "small ring", "small async all_reduce"])
def test_an_interrupt_ends_a_wait_at_once_and_the_others_hear_of_it(operation):
    culprit = 0
    with GlooWorld(3, be_interrupted, operation, culprit) as world:
        world.await_word("ready", culprit)
        await_state(world.actors[culprit].pid, "S")
        interrupted = world.actors[culprit].signal(signal.SIGINT)
        (report,) = world.reports(culprit)
        assert time.monotonic() - interrupted < DEATH_SECONDS  # closing included
        assert report.kind == "KeyboardInterrupt"
        for again in report.later:
            assert again.kind == "TransportError", again
            assert again.seconds < AT_ONCE_SECONDS
        for rank in (1, 2):
            world.actors[rank].say("go on")
        for report in world.reports(1, 2):
            assert (report.kind, report.peer) == ("PeerLost", culprit), report
            assert "KeyboardInterrupt" in report.message


def test_an_interrupted_program_ends_at_once_and_leaves_nothing(temporary_folder):
    """Ctrl-C at a terminal interrupts the program and all its ranks."""
    process = subprocess.Popen(
        [sys.executable, gloo_acts.__file__],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary_folder)},
    )
    pidfds = []
    try:
        pids = [int(process.stdout.readline().split()[1]) for _ in range(3)]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        (store,) = temporary_folder.glob("murmura-*/store")
        assert store.exists()
        os.killpg(process.pid, signal.SIGINT)
        interrupted = time.monotonic()
        errors = process.communicate(timeout=20.0)[1].decode()
        assert time.monotonic() - interrupted < PROMPT_SECONDS
        assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 1)
        assert "KeyboardInterrupt" in errors
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], PROMPT_SECONDS)[0], "a rank outlived the program"
    finally:
        process.kill()
        process.communicate()
        for pidfd in pidfds:
            os.close(pidfd)


# What run_world raises


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("SIGKILL", PeerLost, "rank 1 was killed by SIGKILL"),
        ("raise", ValueError, "rank 1: the loader broke"),
        ("return", PeerLost, "rank 1 closed its transport and left"),
        ("sys.exit", PeerLost, r"rank 1 left with sys.exit\(7\)"),
        ("os._exit", PeerLost, "rank 1 exited with status 7"),
    ],
)
def test_run_world_raises_the_cause(fault, error, words):
    began = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        run_world(fail_as, 3, fault, "best_effort", kind="processes", transport="gloo", timeout=20.0)
    assert time.monotonic() - began < 2 * PROMPT_SECONDS
    assert getattr(caught.value, "peer", CULPRIT) == CULPRIT


def test_run_world_ends_a_stopped_process():
    with pytest.raises(PeerTimeout, match="for rank 1 in all_reduce #5") as caught:
        run_world(fail_as, 3, "SIGSTOP", "best_effort", kind="processes", transport="gloo", timeout=TIMEOUT)
    assert caught.value.peer == CULPRIT


@pytest.mark.parametrize("fault", ["large and longer", "large and shorter"])
def test_where_gloo_aborts_a_process_run_world_names_the_rank_and_the_signal(fault):
    """It is the rank to which too much was sent that Gloo aborts, not always the one that is wrong."""
    with pytest.raises(PeerLost, match=r"rank (\d) was killed by SIGABRT\.") as caught:
        run_world(fail_as, 3, fault, "best_effort", kind="processes", transport="gloo", timeout=20.0)
    assert f"rank {caught.value.peer} was killed" in str(caught.value)
    assert fault == "large and longer" or caught.value.peer == CULPRIT


@pytest.mark.parametrize(
    ("fault", "check", "call"),
    [
        ("broadcast", "best_effort", f"broadcast(src=0) of float32[{NUMEL}]"),
        ("int16", "best_effort", f"all_reduce(sum) of int16[{NUMEL}]"),
        ("barrier", "best_effort", "barrier()"),
        ("longer", "best_effort", f"all_reduce(sum) of float32[{NUMEL + 1}]"),
        ("shorter", "best_effort", f"all_reduce(sum) of float32[{NUMEL // 2}]"),
        ("float64", "best_effort", f"all_reduce(sum) of float64[{NUMEL}]"),
        ("barrier", "always", "barrier()"),
        ("shorter", "always", f"all_reduce(sum) of float32[{NUMEL // 2}]"),
        ("float64", "always", f"all_reduce(sum) of float64[{NUMEL}]"),
        ("max", "always", f"all_reduce(max) of float32[{NUMEL}]"),
    ],
)
def test_run_world_raises_the_table_of_calls(fault, check, call):
    with pytest.raises(CollectiveMismatch, match=re.escape(f"rank 1: {call}")) as caught:
        run_world(fail_as, 3, fault, check, kind="processes", transport="gloo", timeout=TIMEOUT)
    assert caught.value.calls == {0: CALL, 1: call, 2: CALL}


# Expectations that Gloo does not meet as shared memory does


def _expect_timeout(report: Report, culprit: int, more: float = 0.0) -> None:
    """The rank waited until its deadline, then for a moment for the others to say what they know."""
    assert (report.kind, report.rank, report.peer) == ("PeerTimeout", report.own, culprit), report
    assert "TimeoutError" in report.family
    assert "raise the timeout" in report.message
    assert re.search(rf"for rank {culprit} in all_reduce #\d+\.", report.message)
    assert TIMEOUT <= report.waited < TIMEOUT + roll_call_seconds(TIMEOUT) + SLACK_SECONDS + more
    _expect_poisoned(report)


def _expect_poisoned(report: Report) -> None:
    assert report.later
    for again in report.later:
        assert (again.kind, again.peer) == (report.kind, report.peer), again
        assert again.seconds < AT_ONCE_SECONDS, again
