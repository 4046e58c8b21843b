"""Whatever a rank was doing, and however it heard of a failure: its error names the rank that is at fault."""

import os
import re
import signal
import threading

import pytest
import torch
from gloo_acts import GlooWorld
from hosts_acts import HostsWorld
from scenario import Stage, World

from murmura import InProcessTransport, PeerLost, PeerTimeout, Transport, TransportError, run_world
from murmura.errors import MurmuraError
from murmura.transports.error_reporter import ExitNotice, Reporter
from murmura.transports.rendezvous import file_store, sign_in
from murmura.transports.stalls import at_fault

TIMEOUT = 1.0
DEATH_SECONDS = 2.0


def told_by_ranks(transports: list[Transport], program) -> dict[int, BaseException]:
    """What each rank of a world of threads raised."""
    raised: dict[int, BaseException] = {}

    def run(transport: Transport) -> None:
        try:
            with transport:
                program(transport)
        except BaseException as error:
            raised[transport.rank] = error

    threads = [threading.Thread(target=run, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return raised


# Threads


def test_on_a_channel_of_a_channel_every_rank_names_the_one_that_raised_and_its_operation():
    def program(transport):
        channel = transport.channel("outer").channel("inner")
        channel.barrier()
        if transport.rank == 2:
            raise ValueError("the loader broke")
        channel.all_reduce(torch.ones(3))

    raised = told_by_ranks(InProcessTransport.create_group(4, timeout=20.0), program)
    for rank in (0, 1, 3):
        error = raised[rank]
        assert type(error) is PeerLost
        assert (error.rank, error.peer, error.operation) == (rank, 2, "all_reduce #2")
        assert "rank 2 raised ValueError: the loader broke" in str(error)


def test_a_subgroup_speaks_in_ranks_of_the_world():
    def program(transport):
        subgroup = transport.subgroup([3, 1])
        if subgroup is None:
            return
        subgroup.barrier()
        if transport.rank == 1:
            raise ValueError("the loader broke")
        subgroup.all_reduce(torch.ones(3))

    error = told_by_ranks(InProcessTransport.create_group(4, timeout=20.0), program)[3]
    assert (type(error), error.rank, error.peer) == (PeerLost, 3, 1)
    assert str(error).startswith("rank 3 lost rank 1 in all_reduce #2: rank 1 raised ValueError")


def test_ranks_that_learn_it_from_another_name_the_cause_and_not_the_messenger():
    """Rank 1 raises; rank 2 fails for it; rank 3, which waits for rank 2 on another channel, hears it from there."""
    second_hand = threading.Event()

    def program(transport):
        one, two = transport.channel("one"), transport.subgroup([3, 2])
        if transport.rank == 1:
            raise ValueError("the loader broke")
        if transport.rank == 2:
            one.recv(torch.zeros(1), 1)
        if transport.rank == 3:
            second_hand.wait(20.0)
            two.recv(torch.zeros(1), 1)

    def run(transport):
        try:
            program(transport)
        except BaseException as error:
            transport.abort(error)
            if transport.rank == 2:
                second_hand.set()
            raise

    raised = told_by_ranks(InProcessTransport.create_group(4, timeout=20.0), run)
    assert isinstance(raised[1], ValueError)
    for rank in (2, 3):
        assert (type(raised[rank]), raised[rank].rank, raised[rank].peer) == (PeerLost, rank, 1)
        assert "the loader broke" in str(raised[rank])


def test_what_an_error_was_raised_from_is_the_cause_that_the_others_hear():
    lost = Reporter(2, range(4)).lost(1, "all_reduce #3")
    try:
        try:
            raise lost
        except PeerLost as error:
            raise RuntimeError("training failed") from error
    except RuntimeError as error:
        notice = ExitNotice.of(error, 2)
    heard = notice.as_error(0, 2, "barrier #4")
    assert (type(heard), heard.rank, heard.peer, heard.operation) == (PeerLost, 0, 1, "barrier #4")
    again = ExitNotice.of(heard, 0).as_error(3, 0, "barrier #4")
    assert (type(again), again.rank, again.peer) == (PeerLost, 3, 1)


def test_a_rank_that_hangs_is_a_timeout_for_everyone_also_for_the_one_that_hears_of_it():
    released = threading.Event()
    seen = {}

    def program(transport):
        channel = transport.channel("side")
        channel.barrier()
        if transport.rank == 3:
            released.wait(30.0)
            return
        try:
            # Rank 0 has more patience than the others, and is told by their end.
            channel.all_reduce(torch.ones(3), timeout=20.0 if transport.rank == 0 else TIMEOUT)
        except MurmuraError as error:
            seen[transport.rank] = error
            if len(seen) == 3:
                released.set()
            raise

    with pytest.raises(PeerTimeout) as caught:
        run_world(program, 4, timeout=20.0)
    released.set()
    assert caught.value.peer == 3
    for rank in (0, 1, 2):
        error = seen[rank]
        assert (type(error), error.rank, error.peer) == (PeerTimeout, rank, 3), error
        assert error.operation == "all_reduce #2"


def test_a_rank_that_only_waits_for_another_is_not_blamed_for_a_timeout():
    """Rank 0 waits for 1, which waits for 2, which does nothing; rank 0's deadline is the first."""
    released = threading.Event()

    def program(transport):
        transport.barrier()
        if transport.rank == 2:
            released.wait(30.0)
        elif transport.rank == 1:
            transport.recv(torch.zeros(1), 2, timeout=20.0)
        else:
            try:
                transport.recv(torch.zeros(1), 1, timeout=TIMEOUT)
            finally:
                released.set()

    error = told_by_ranks(InProcessTransport.create_group(3, timeout=20.0), program)[0]
    assert (type(error), error.peer) == (PeerTimeout, 2)


def wait_in_a_chain(transport: Transport, do_nothing) -> None:
    """Rank 2 waits for 1, which waits on another channel for 0, which does nothing; rank 2's deadline is the first."""
    one, two = transport.split("one", [0, 1]), transport.split("two", [1, 2])
    transport.barrier()
    if transport.rank == 0:
        do_nothing()
    elif transport.rank == 1:
        one.all_reduce(torch.ones(1), timeout=TIMEOUT)
    else:
        two.all_reduce(torch.ones(1), timeout=0.8 * TIMEOUT)


def test_a_rank_that_waits_on_another_channel_is_not_blamed_for_a_timeout():
    ended = threading.Barrier(3)

    def program(transport):
        try:
            wait_in_a_chain(transport, lambda: ended.wait(30.0))
        finally:
            if transport.rank > 0:
                ended.wait(30.0)

    raised = told_by_ranks(InProcessTransport.create_group(3, timeout=20.0), program)
    for rank in (1, 2):
        assert (type(raised[rank]), raised[rank].rank, raised[rank].peer) == (PeerTimeout, rank, 0), raised


def test_a_circle_of_ranks_that_wait_for_each_other_blames_whom_each_waits_for():
    awaited = {1: [2], 2: [3], 3: [1]}

    def awaited_by(rank):
        return awaited.get(rank, ())

    assert at_fault([1], awaited_by, own=0) == [1]
    assert at_fault([2], awaited_by, own=1) == [2]
    awaited[3] = [1, 4]
    assert at_fault([2], awaited_by, own=1) == [4]


def test_several_messages_of_one_rank_name_it_once():
    def program(transport):
        if transport.rank == 0:
            transport.exchange([], [(torch.zeros(1), 1)] * 4, timeout=0.1)
        else:
            released.wait(30.0)

    released = threading.Event()
    transports = InProcessTransport.create_group(2, timeout=20.0)
    thread = threading.Thread(target=lambda: program(transports[1]))
    thread.start()
    with pytest.raises(PeerTimeout, match="for rank 1 in exchange"):
        program(transports[0])
    released.set()
    thread.join()


def test_the_others_are_cancelled_with_the_rank_that_raised():
    """They compute while rank 0 raises, and hear of it at their next communication."""
    failed = threading.Event()
    all_have_a_channel = threading.Barrier(3)
    seen = {}

    def program(transport):
        channel = transport.channel("side")
        all_have_a_channel.wait(20.0)
        if transport.rank == 0:
            raise ValueError("the loader broke")
        failed.wait(20.0)
        try:
            channel.all_reduce(torch.ones(3))
        except TransportError as error:
            seen[transport.rank] = error
            raise

    def run(transport):
        if transport.rank == 0:
            threading.Timer(0.5, failed.set).start()
        program(transport)

    with pytest.raises(ValueError, match="rank 0: the loader broke"):
        run_world(run, 3, timeout=20.0)
    for rank in (1, 2):
        error = seen[rank]
        assert (type(error), error.rank, error.peer, error.operation) == (PeerLost, rank, 0, "all_reduce #1")


# Processes: a rank that dies while a channel is being built


def die_before_channel(stage: Stage, culprit: int) -> None:
    stage.transport.barrier()
    if stage.rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    stage.mark()
    stage.transport.channel("ddp")


@pytest.mark.parametrize("world", ["gloo", "hosts"])
def test_a_death_while_a_channel_is_built_is_named_within_two_seconds(world):
    made = GlooWorld(3, die_before_channel, 1) if world == "gloo" else HostsWorld((1, 1, 0, 0), die_before_channel, 1)
    with made:
        for report in made.reports(*(rank for rank in range(made.world_size) if rank != 1)):
            assert (report.kind, report.rank, report.peer) == ("PeerLost", report.own, 1), report
            assert report.operation
            assert report.waited < DEATH_SECONDS


def be_absent_from_channel(stage: Stage, culprit: int) -> None:
    stage.transport.barrier()
    if stage.rank == culprit:
        stage.hear()
        return
    stage.mark()
    stage.transport.channel("ddp")


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_does_not_come_to_a_channel_is_a_timeout_for_all_others(culprit):
    with GlooWorld(4, be_absent_from_channel, culprit, timeout=TIMEOUT) as world:
        for report in world.reports(*world.others(culprit)):
            assert (report.kind, report.rank, report.peer) == ("PeerTimeout", report.own, culprit), report


def test_whom_rank_zero_lost_at_a_rendezvous_all_others_lose(tmp_path):
    """Rank 0 hears from somewhere else that rank 2 raised; rank 1 hears it from rank 0."""
    raised: dict[int, BaseException] = {}
    heard = ExitNotice(2, "raised ValueError: the loader broke", "raised").as_error(0, 2, "split('ddp')")

    def meet(rank: int) -> None:
        try:
            sign_in(file_store(str(tmp_path / "store"), 3), rank, 3, 20.0, watch=lambda: heard if rank == 0 else None)
        except MurmuraError as error:
            raised[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    for rank in (0, 1):
        error = raised[rank]
        assert isinstance(error, PeerLost), error
        assert (error.rank, error.peer) == (rank, 2)
        assert "the loader broke" in str(error)


def play_chain(stage: Stage) -> None:
    stage.tries_again = False  # the world itself has not failed
    wait_in_a_chain(stage.transport, stage.hear)


@pytest.mark.parametrize("world", ["processes", "gloo", "hosts"])
def test_a_process_that_waits_on_another_channel_is_not_blamed_for_a_timeout(world):
    made = {
        "processes": lambda: World("processes", 3, play_chain),
        "gloo": lambda: GlooWorld(3, play_chain),
        "hosts": lambda: HostsWorld((0, 1, 1), play_chain),
    }[world]()
    with made:
        for report in made.reports(1, 2):
            assert (report.kind, report.rank, report.peer) == ("PeerTimeout", report.own, 0), report


def split_and_fail(stage: Stage, culprit: int) -> None:
    hosts = stage.transport.hosts
    near = [rank for rank, host in enumerate(hosts) if host == hosts[stage.rank]]
    inside = stage.transport.split("host", near)
    inside.barrier()
    if stage.rank == culprit:
        raise ValueError("the loader broke")
    if stage.rank in near and culprit in near:
        inside.barrier()
    stage.transport.barrier()


def test_parts_of_a_hierarchy_speak_in_ranks_of_the_world():
    with HostsWorld((1, 1, 0, 0), split_and_fail, 3) as world:
        for report in world.reports(0, 1, 2):
            assert (report.kind, report.rank, report.peer) == ("PeerLost", report.own, 3), report
            assert "the loader broke" in report.message
            assert re.match(rf"rank {report.own} lost rank 3 in barrier #\d: rank 3 raised ValueError", report.message)
