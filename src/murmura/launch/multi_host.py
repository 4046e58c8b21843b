"""The launchers of several hosts number the ranks together, start attempts together, and report failures to each other.

They use a store at a fixed address, which node 0's launcher serves as long as any of them has ranks running. Values
are JSON, signed if the job has a secret. Each launcher writes a heartbeat; node 0 reports those whose heartbeat stops
as lost. If the store stops to answer, node 0's launcher is lost to the others.
"""

from __future__ import annotations

import json
import math
import platform
import time
import uuid
from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from murmura.config import parse_address
from murmura.errors import ConfigError, RendezvousError
from murmura.launch.plan import Attempt, LaunchPlan
from murmura.launch.root_cause import CRASH_PRIORITY, STOPPED_PRIORITY, Failure, root_cause
from murmura.launch.supervisor import GRACE_SECONDS, KILL_SECONDS, STOP_AFTER_FAILURE_SECONDS
from murmura.transports.bounded_store import StoreSilent
from murmura.transports.rendezvous import Store, bounded, reach_store, serve_store, under
from murmura.transports.signed_store import ADVICE, SignedStore
from murmura.transports.watched_store import nobody, poll

POLL_SECONDS = 0.05
HEARTBEAT_SECONDS = 0.5  # between two heartbeats, and between two checks of the other hosts
LOST_SECONDS = 15.0  # without a heartbeat, or an answer of the store: the launcher counts as lost; busy hosts are late
LOST_AFTER_FAILURE_SECONDS = 5.0  # the same once the job has failed
SCOPE = "murmura/launch"


class LauncherGroup:
    """This host's membership in the group of all hosts' launchers."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._peers = [node for node in range(plan.num_nodes) if node != plan.node_rank]
        self._address = parse_address(plan.coordinator)
        store = _serve(plan) if plan.node_rank == 0 else _reach(plan)
        self._store = under(bounded(store), SCOPE)  # the launcher watches its ranks while it does not answer
        if plan.secret:
            self._store = SignedStore(self._store, plan.secret, SCOPE)
        self._checked_at = 0.0
        self._heartbeat_at = 0.0
        self._heartbeats: dict[int, tuple[bytes, float]] = {}  # at node 0, by node: the last value, and since when
        self._lost: set[int] = set()
        self._silent_since: float | None = None
        self._gave_up: StoreSilent | None = None  # why ranks were stopped; it may answer again
        self._hosts: list[str] = []

    def rendezvous(self, number: int) -> Attempt:
        """Wait until the launchers of all hosts are ready for this attempt; a `RendezvousError` at the deadline."""
        plan = self._plan
        own: dict[str, Any] = {
            "ranks": plan.num_ranks,
            "nodes": plan.num_nodes,
            "restarts": plan.max_restarts,
            "host": platform.node(),
            "job": uuid.uuid4().hex,
        }
        try:
            self._store.set(f"ready/{number}/{plan.node_rank}", json.dumps(own))
            missing = self._await(f"ready/{number}", plan.timeout)
            if missing:
                raise RendezvousError(
                    f"host {plan.node_rank} waited {plan.timeout:.0f} s, but of {plan.num_nodes} hosts {missing} did "
                    "not come. Was murmura run started on them, with the same --coordinator and each its --node-rank?",
                    tuple(missing),
                )
            nodes = [self._read_node(number, node) for node in range(plan.num_nodes)]
            self._check_same(nodes, own)
            self._admit(number, [each["job"] for each in nodes], own["job"])
        except dist.DistError as error:
            raise RendezvousError(
                f"host {plan.node_rank} lost the launcher of host 0 at {plan.coordinator}: its own output says why. "
                f"(torch says: {error})",
                (0,),
            ) from error
        self._hosts = [each["host"] for each in nodes]
        self._heartbeats.clear()
        self._gave_up = None
        ranks = [each["ranks"] for each in nodes]
        return Attempt(
            job=nodes[0]["job"],
            number=number,
            first_rank=sum(ranks[: plan.node_rank]),
            world_size=sum(ranks),
            master=self._address,
        )

    def _check_same(self, nodes: list[dict[str, Any]], own: dict[str, Any]) -> None:
        for node, each in enumerate(nodes):
            for name, option in (("nodes", "--nnodes"), ("restarts", "--max-restarts")):
                if each[name] != own[name]:
                    raise RendezvousError(
                        f"host {node} was started with {option} {each[name]}, host {self._plan.node_rank} with "
                        f"{own[name]}. Start all hosts with the same."
                    )

    def _admit(self, number: int, jobs: list[str], own: str) -> None:
        """Node 0 admits those whom it has read; of two launchers with one --node-rank, the other starts nothing."""
        plan, key = self._plan, f"admitted/{number}"
        if plan.node_rank == 0:
            self._store.set(key, json.dumps(jobs))
            return
        if not poll(lambda: bool(self._store.check([key])), plan.timeout, nobody):
            raise RendezvousError(f"host {plan.node_rank} waited {plan.timeout:.0f} s for host 0 to admit it.", (0,))
        if own.encode() not in self._get(key):
            raise RendezvousError(
                f"host 0 has admitted another launcher as host {plan.node_rank}. Give each host its own --node-rank."
            )

    def has_failure(self, attempt: Attempt) -> bool:
        """Whether the ranks of another host failed, or its launcher was lost; asks the store every `HEARTBEAT_SECONDS`.

        It also writes the heartbeat, so it must be called often while this host's ranks run.
        """
        if time.monotonic() - self._checked_at < HEARTBEAT_SECONDS:
            return False
        self._checked_at = time.monotonic()
        try:
            self._heartbeat(attempt, LOST_SECONDS)
            self._check_answers()
            return bool(self._store.check([f"{attempt.job}/failed"]))
        except StoreSilent as error:
            self._gave_up = error
            return True
        except dist.DistError:
            return True

    def report(self, attempt: Attempt, failure: Failure | None) -> None:
        """Report to the other hosts how this host's ranks ended."""
        try:
            self._report_node(self._plan.node_rank, attempt, failure)
        except dist.DistError:
            return  # node 0's launcher, and with it the store, has ended

    def await_root_cause(self, attempt: Attempt, failure: Failure | None) -> Failure | None:
        """Wait for the other hosts to end, and return the root cause among the failures of all hosts.

        After a failure the wait has a deadline. Without one it lasts as long as the other hosts have ranks running,
        for they need the store; a host whose launcher dies is a failure.
        """
        if self._gave_up is not None and failure is not None and failure.priority == STOPPED_PRIORITY:
            failure = self._launcher_lost(0, str(self._gave_up))
        self.report(attempt, failure)
        failures = [failure] if failure else []
        try:
            missing = self._await_ends(attempt)
            for node in self._peers:
                if node not in missing:
                    reported = self._get(f"{attempt.job}/ended/{node}")
                    if reported != b"null":
                        failures.append(Failure.from_json(reported))
        except StoreSilent as error:
            stopped = failure is None or failure.priority == STOPPED_PRIORITY  # for that reason
            return self._launcher_lost(0, str(error)) if stopped else failure
        except dist.DistError:
            return failure or self._launcher_lost(0, "The others cannot know how this job ended.")
        except ValueError:
            return failure
        self._await_readers(attempt)
        return root_cause(failures)

    def _report_node(self, node: int, attempt: Attempt, failure: Failure | None) -> None:
        if failure is not None:
            self._store.set(f"{attempt.job}/failed", b"")
        self._store.set(f"{attempt.job}/ended/{node}", "null" if failure is None else failure.to_json())

    def _await_ends(self, attempt: Attempt) -> list[int]:
        """Wait until every host has ended; return those that have not by the deadline, which a failure sets."""
        deadline = math.inf
        missing = list(self._peers)
        while missing := [node for node in missing if not self._store.check([f"{attempt.job}/ended/{node}"])]:
            has_failed = deadline < math.inf
            if not has_failed and self._store.check([f"{attempt.job}/failed"]):
                deadline = time.monotonic() + GRACE_SECONDS + STOP_AFTER_FAILURE_SECONDS + KILL_SECONDS
            if time.monotonic() > deadline:
                break
            self._check_answers()
            self._heartbeat(attempt, LOST_AFTER_FAILURE_SECONDS if has_failed else LOST_SECONDS)
            time.sleep(POLL_SECONDS)
        return missing

    def _await_readers(self, attempt: Attempt) -> None:
        """Node 0 waits until the others have read the reports, for its store ends with it."""
        try:
            self._store.set(f"{attempt.job}/read/{self._plan.node_rank}", b"")
            if self._plan.node_rank == 0:
                self._await(f"{attempt.job}/read", LOST_SECONDS, except_for=self._lost)
        except dist.DistError:
            return  # node 0 has read all reports and ended

    def _heartbeat(self, attempt: Attempt, lost_seconds: float) -> None:
        """Write the heartbeat; node 0 reports those without one for `lost_seconds` as lost."""
        now = time.monotonic()
        if now - self._heartbeat_at < HEARTBEAT_SECONDS:
            return
        self._heartbeat_at = now
        if self._plan.node_rank != 0:
            self._store.set(f"{attempt.job}/beat/{self._plan.node_rank}", str(now))
            return
        for node in self._peers:
            heartbeat, since = self._read_heartbeat(attempt, node), now
            if node in self._heartbeats and heartbeat == self._heartbeats[node][0]:
                since = self._heartbeats[node][1]
            self._heartbeats[node] = heartbeat, since
            if now - since > lost_seconds and not self._store.check([f"{attempt.job}/ended/{node}"]):
                message = f"It has sent no heartbeat for {lost_seconds:.0f} s"
                message += ": it was killed, or its host or the network is down."
                self._report_node(node, attempt, self._launcher_lost(node, message))
                self._lost.add(node)

    def _read_heartbeat(self, attempt: Attempt, node: int) -> bytes:
        key = f"{attempt.job}/beat/{node}"
        try:
            return self._get(key) if self._store.check([key]) else b""
        except RendezvousError:  # not signed with the secret: written by a stranger
            return b""

    def _launcher_lost(self, node: int, message: str) -> Failure:
        return Failure(None, f"host {node} ({self._hosts[node]})", 1, message, CRASH_PRIORITY, is_lost=True)

    def _await(self, what: str, seconds: float, except_for: Collection[int] = ()) -> list[int]:
        """Wait until every node has set the key `what`/<node>; return those that have not after `seconds`."""
        deadline = time.monotonic() + seconds
        missing = [node for node in range(self._plan.num_nodes) if node not in except_for]
        while missing := [node for node in missing if not self._store.check([f"{what}/{node}"])]:
            if time.monotonic() > deadline:
                return missing
            self._check_answers()
            time.sleep(POLL_SECONDS)
        return []

    def _get(self, key: str) -> bytes:
        """What somebody has set in the store; one that is slow is asked again."""
        while True:
            try:
                return bytes(self._store.get(key))
            except StoreSilent:
                self._check_answers()
                time.sleep(POLL_SECONDS)

    def _check_answers(self) -> None:
        """Raise `StoreSilent` if the store has not answered for `LOST_SECONDS`."""
        now = time.monotonic()
        if not self._store.is_silent:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > LOST_SECONDS:
            raise StoreSilent(
                f"It has not answered for {LOST_SECONDS:.0f} s: it was stopped, or its host or the network is down."
            )

    def _read_node(self, number: int, node: int) -> dict[str, Any]:
        try:
            fields = json.loads(self._get(f"ready/{number}/{node}"))
            numbers = {name: int(fields[name]) for name in ("ranks", "nodes", "restarts")}
            return {**numbers, "job": str(fields["job"]), "host": str(fields["host"])}
        except (ValueError, TypeError, KeyError) as error:
            raise RendezvousError(
                f"host {self._plan.node_rank} cannot read what host {node} left in the store. {ADVICE}", (node,)
            ) from error


def _serve(plan: LaunchPlan) -> Store:
    store = serve_store(*parse_address(plan.coordinator), plan.num_nodes, plan.timeout)
    if store is None:
        raise ConfigError(
            f"host 0 cannot listen at {plan.coordinator}. Is the address this host's, and does another job use the "
            "port? Choose another one, on all hosts."
        )
    return store


def _reach(plan: LaunchPlan) -> Store:
    return reach_store(*parse_address(plan.coordinator), plan.node_rank, plan.timeout, caller="host")
