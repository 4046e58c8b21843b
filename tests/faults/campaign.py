"""A seeded campaign of random faults, and its judge.

    python tests/faults/campaign.py --seed 0 --cases 300 [--transport threads] [--jobs 2]
    python tests/faults/campaign.py --case 0-17

A survivor is every rank but the culprit. Each trains on until an error ends it, so each comes to a collective; only
where the fault is at the very end may it come to its own end instead. What a user may expect of a survivor's error:

- `PeerLost` if the culprit raised, was killed or exited; `PeerTimeout` if it was stopped. A failure inside the user's
  part of `Checkpointer.save` may also be the `CheckpointError` that save promises.
- `.rank` is the survivor's own, `.peer` the culprit's rank in the world, whoever brought the news; the text names
  both, loses nobody else, names no rank twice, and holds the words of an exception that the culprit raised.
- It comes within two seconds of a death, or at the deadline of the wait.

The culprit, if it still can, raises its own exception and not a consequence of it. Then nothing is left.
"""

import argparse
import collections
import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from campaign_cases import BACKEND, COMPUTE_SECONDS, STOCK_DDP, THREADS, TRANSPORTS, Case, case_of
from campaign_rank import STORY, Ending, holdings, live, remains
from scenario import Actor
from traces import PORTS, is_gone, segments_of

from murmura import InProcessTransport, Transport, run_world

DEATH_SECONDS = 2.0  # a death is noticed in this time, whatever the deadline
LATE_SECONDS, LATE_SHARE = 1.0, 0.1  # how much later than its deadline a wait may end
LEAVE_SECONDS = 2.0  # for closing a transport that has failed
SLACK_SECONDS = 1.5  # for a machine on which others work too; on top of all of these
HANG_SECONDS = 30.0  # beyond its deadline: a rank that says nothing by then hangs


@dataclass
class Verdict:
    """What was wrong in a case: of each survivor, of the culprit, and with what was left."""

    case: Case
    survivors: dict[int, list[str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wrong(self) -> list[int]:
        return [rank for rank, complaints in self.survivors.items() if complaints]

    @property
    def is_right(self) -> bool:
        return not self.wrong and not self.others


def run(case: Case) -> Verdict:
    """Play a case and judge it."""
    began = time.monotonic()
    verdict = Verdict(case)
    before = holdings()
    folder = tempfile.mkdtemp(prefix="campaign-")
    released = threading.Event()
    actors: list[Actor] = []
    endings: dict[int, Ending] = {}
    try:
        actors = _start(case, folder, released)
        within = case.timeout + HANG_SECONDS
        fault_at = _inject(case, actors, within)
        for rank in case.survivors:
            try:
                endings[rank] = actors[rank].await_word("ending", within)["ending"]
                verdict.survivors[rank] = judge(case, endings[rank], fault_at)
            except AssertionError as error:
                verdict.survivors[rank] = [f"no word of how it ended: {error}"]
        released.set()
        if case.in_world:
            verdict.others += judge_world(case, *actors[-1].await_word("world", within)["raised"])
        if case.fault in ("raise", "sys.exit") or (case.fault == "stop" and case.transport == THREADS):
            endings[case.culprit] = actors[case.culprit].await_word("ending", within)["ending"]
            verdict.others += judge_culprit(case, endings[case.culprit])
    except AssertionError as error:
        verdict.others.append(f"the case could not be played: {error}")
    finally:
        released.set()
        for rank in endings:
            if case.transport != THREADS and actors[rank].exitcode is None:  # what it does at its exit, it may do
                verdict.others.append(f"the process of rank {rank} does not end")
        for actor in actors:
            actor.end()
        verdict.others += _left(case, folder, actors, endings.values(), before)
        shutil.rmtree(folder)
    verdict.seconds = time.monotonic() - began
    return verdict


def _start(case: Case, folder: str, released: threading.Event) -> list[Actor]:
    """An actor for each rank, and after them, if there is a run_world, one for that."""
    if case.in_world:
        pipes: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        ranks = [Actor(f"rank {rank}", pipes.put, thread=True) for rank in range(case.world_size)]
        return [*ranks, Actor("run_world", _run_world, pipes, case, folder, released, thread=True)]
    if case.transport == THREADS:
        group = InProcessTransport.create_group(case.world_size, hosts=case.hosts, timeout=case.timeout)
        return [
            Actor(f"rank {each.rank}", live, case, each.rank, folder, each, released, thread=True) for each in group
        ]
    return [Actor(f"rank {rank}", live, case, rank, folder, None, None) for rank in range(case.world_size)]


def _run_world(
    pipe: Connection, pipes: queue.SimpleQueue[Connection], case: Case, folder: str, released: threading.Event
) -> None:
    to_judge = [pipes.get() for _ in range(case.world_size)]

    def fn(transport: Transport) -> None:
        live(to_judge[transport.rank], case, transport.rank, folder, transport, released)

    try:
        run_world(fn, case.world_size, hosts=case.hosts, timeout=case.timeout)
        raised: tuple[str, str, int | None] = ("", "", None)
    except BaseException as error:  # it is what the judge wants to see
        raised = (type(error).__name__, str(error), getattr(error, "peer", None))
    with contextlib.suppress(OSError):  # the judge may have left
        pipe.send(("world", {"raised": raised}))
    pipe.close()


def _inject(case: Case, actors: Sequence[Actor], within: float) -> float:
    """When the fault happened; one from outside is sent now."""
    if case.moment != "any moment, from outside":
        return float(actors[case.culprit].await_word("fault", within)["at"])
    for actor in actors[: case.world_size]:
        actor.await_word("training", within)
    time.sleep(case.delay)  # the moment is to be random
    return actors[case.culprit].signal(signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)


# Judging


def judge(case: Case, ending: Ending, fault_at: float) -> list[str]:
    """What is wrong with a survivor's ending."""
    waited = ending.ended - fault_at
    wrong = [f"left behind {each}" for each in ending.left]
    if ending.closed - ending.ended > LEAVE_SECONDS + SLACK_SECONDS:
        wrong.append(f"took {ending.closed - ending.ended:.1f} s to close")
    if waited > _limit(case):
        wrong.append(f"{waited:.1f} s after the fault, not within {_limit(case):.1f} s")
    if not ending.kind:
        return wrong if case.moment == "end" else [*wrong, "raised nothing"]
    if wrong_error := [*_judge_fields(case, ending), *_judge_words(case, ending.message)]:
        wrong += [*wrong_error, f"it raised {ending.kind} {ending.fields}: {ending.message}"]
    return wrong


def _judge_fields(case: Case, ending: Ending) -> Iterator[str]:
    if ending.kind == "CheckpointError" and case.moment == "save, inside state_dict" and case.fault == "raise":
        if ending.fields["rank"] != case.culprit:
            yield f".rank of CheckpointError is not {case.culprit}"
        return
    expected = "PeerTimeout" if case.fault == "stop" else "PeerLost"
    if case.transport == BACKEND and case.algorithm == STOCK_DDP and ending.kind == "RuntimeError":
        return  # torch's C++ keeps the text alone
    if ending.kind != expected:
        yield f"{ending.kind}, not {expected}"
    if ending.fields.get("peer") != case.culprit:
        yield f".peer is {ending.fields.get('peer')}, not {case.culprit}"
    if ending.fields.get("rank") != ending.rank:
        yield f".rank is {ending.fields.get('rank')}, not {ending.rank}"
    if not re.search(rf"\brank {ending.rank}\b", ending.message, re.IGNORECASE):
        yield f"the text does not name rank {ending.rank}"


def _judge_words(case: Case, words: str) -> Iterator[str]:
    if not re.search(rf"\branks? (\d+, )*(\d+ and )?{case.culprit}\b", words, re.IGNORECASE):
        yield f"the text does not name rank {case.culprit}"
    if innocent := {int(rank) for rank in re.findall(r"\blost rank (\d+)", words)} - {case.culprit}:
        yield f"the text loses {sorted(innocent)}"
    for listed in re.findall(r"\branks (\d+(?:, \d+)* and \d+)", words):
        ranks = re.findall(r"\d+", listed)
        if len(ranks) > len(set(ranks)):
            yield f"the text names a rank twice: {listed}"
    if (
        case.fault == "raise" and case.transport != BACKEND and STORY not in words
    ):  # destroy_process_group hears of none
        yield "the text is without the culprit's exception"


def judge_culprit(case: Case, ending: Ending) -> list[str]:
    """What is wrong with the ending of a culprit that could say how it ended."""
    wrong = [f"the culprit left behind {each}" for each in ending.left]
    told = f"the culprit ended with {ending.kind} {ending.fields}: {ending.message}"
    if case.fault == "raise" and STORY not in ending.message:
        wrong.append(told)
    if case.fault == "sys.exit" and ending.kind != "SystemExit":
        wrong.append(told)
    return wrong


def judge_world(case: Case, kind: str, message: str, peer: int | None) -> list[str]:
    """What is wrong with the error that run_world raised: it is the culprit's own, or names the culprit."""
    told = f"run_world raised {kind} (peer={peer}): {message}"
    if case.fault == "raise":
        kinds = ("CheckpointError",) if case.moment == "save, inside state_dict" else ("Broken",)
        is_right = kind in kinds and STORY in message and f"rank {case.culprit}" in message
    elif case.fault == "stop" and case.moment == "end":
        is_right = not kind or peer == case.culprit  # it was let go on, and came to its end
    else:
        is_right = kind == ("PeerTimeout" if case.fault == "stop" else "PeerLost") and peer == case.culprit
    return [] if is_right else [told]


def _limit(case: Case) -> float:
    late = SLACK_SECONDS + (COMPUTE_SECONDS if case.is_late else 0.0)
    if case.fault == "stop":
        return case.timeout * (1 + LATE_SHARE) + LATE_SECONDS + late
    return DEATH_SECONDS + late


def _left(
    case: Case, folder: str, actors: Sequence[Actor], endings: Iterable[Ending], before: dict[object, str]
) -> list[str]:
    """What the world has left: processes, memory, ports, files, and what this process holds."""
    left = [f"{each} is left in this process" for each in remains(before)]
    endings = list(endings)
    if case.transport != THREADS:
        left += [f"process {actor.pid} is left" for actor in actors if not is_gone(actor.pid)]
        segments = {inode for ending in endings for inode in ending.segments}
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            left += [f"process {pid} holds memfd {inode}" for inode in segments_of(pid) & segments]
        sockets = {line.split()[10] for ending in endings for line in ending.ports} - {"0"}
        left += [f"port: {line}" for line in _table() if line.split()[9] in sockets]
    left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if os.path.basename(folder) in name]
    checkpoints = os.path.join(folder, "checkpoints")
    gc.collect()  # of threads: their checkpointers are in tracebacks, and a lock lasts as long as its checkpointer
    # Whoever is killed cannot remove what it writes or has locked; the next save does, and no load looks at it.
    may_stay = () if case.transport == THREADS or case.fault in ("raise", "sys.exit") else (".partial", ".lock")
    for name in os.listdir(checkpoints) if os.path.isdir(checkpoints) else ():
        if name.startswith(".") and not name.endswith(may_stay):
            left.append(f"file {name} is left in the folder of checkpoints")
    return left


def _table() -> Iterator[str]:
    for table in PORTS:
        with open(f"/proc/net/{table}") as lines:
            yield from list(lines)[1:]


# The campaign


def cases_of(seed: int, num_cases: int, transport: str | None = None) -> list[Case]:
    """The first cases of a seed, of all transports or of one."""
    wanted = (case_of(seed, number) for number in range(num_cases * len(TRANSPORTS)))
    return [case for case in wanted if transport in (None, case.transport)][:num_cases]


def run_all(cases: Sequence[Case], jobs: int = 1) -> Iterator[Verdict]:
    """Verdicts in the order of `cases`."""
    if jobs == 1:
        prepare()
        yield from map(run, cases)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), prepare) as pool:
        yield from pool.map(run, cases)


def prepare() -> None:
    """Start the server that ranks are forked from, with what an optimizer imports at its first use: a second each."""
    preloaded = ["torch", "murmura", "torch._dynamo", "torch.distributed.fsdp", "campaign_rank"]
    multiprocessing.set_forkserver_preload(preloaded)
    multiprocessing.forkserver.ensure_running()
    gc.freeze()


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each transport."""
    rows = ["| transport | cases | survivors | survivors wrong | culprit wrong or something left | cases wrong |"]
    rows.append("|---|---|---|---|---|---|")
    for transport in TRANSPORTS:
        ours = [verdict for verdict in verdicts if verdict.case.transport == transport]
        counts = (
            len(ours),
            sum(len(verdict.case.survivors) for verdict in ours),
            sum(len(verdict.wrong) for verdict in ours),
            sum(bool(verdict.others) for verdict in ours),
            sum(not verdict.is_right for verdict in ours),
        )
        rows.append(f"| {transport} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows)


def describe(verdict: Verdict) -> str:
    """A case and what was wrong in it."""
    lines = [f"{'ok   ' if verdict.is_right else 'WRONG'} {verdict.case} [{verdict.seconds:.1f} s]"]
    for rank, complaints in verdict.survivors.items():
        lines += [f"    rank {rank}: {complaint}" for complaint in complaints]
    lines += [f"    {complaint}" for complaint in verdict.others]
    return "\n".join(lines)


def coverage(cases: Iterable[Case]) -> str:
    """How often each moment met each kind of fault."""
    counts = collections.Counter((case.moment, case.fault) for case in cases)
    faults = sorted({fault for _, fault in counts})
    rows = [
        (moment, [str(counts[moment, fault]) for fault in faults]) for moment in sorted({each for each, _ in counts})
    ]
    return "\n".join(f"{title:36}" + "".join(f"{cell:>19}" for cell in cells) for title, cells in [("", faults), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--case", action="append", help="only this one, by its identifier; may be repeated")
    options = parser.parse_args()
    if options.case:
        chosen = [case_of(*map(int, each.split("-"))) for each in options.case]
    else:
        chosen = cases_of(options.seed, options.cases, options.transport)
    began = time.monotonic()
    verdicts = []
    for verdict in run_all(chosen, options.jobs):
        verdicts.append(verdict)
        print(describe(verdict), flush=True)
    print(f"\n{coverage(chosen)}\n\n{table(verdicts)}\n\n{time.monotonic() - began:.0f} s")
    sys.exit(not all(verdict.is_right for verdict in verdicts))


if __name__ == "__main__":
    main()
