"""The launchers of several hosts: they number the ranks, start attempts together, and tell each other of failures.

They meet at a fixed address, in a store that node 0's launcher serves as long as any of them is at work. What they
leave there is JSON, signed if the job has a secret. Each leaves a heartbeat, and node 0 says of those without one that
they are gone.
"""

from __future__ import annotations

import json
import math
import platform
import socket
import time
import uuid
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from murmura.config import parse_address
from murmura.errors import ConfigError, RendezvousError
from murmura.launch.crew import END_AFTER_FAILURE_SECONDS, KILL_SECONDS, LAST_WORDS_SECONDS
from murmura.launch.plan import Attempt, LaunchPlan
from murmura.launch.verdict import Failure, gravest
from murmura.transports.rendezvous import Store, open_store, under
from murmura.transports.signed_store import ADVICE, SignedStore

POLL_SECONDS = 0.05
NEWS_SECONDS = 0.5  # between two looks at how the others are doing, and between two heartbeats
SILENT_SECONDS = 15.0  # without a heartbeat: the launcher is gone; a busy host may be late by some seconds
SILENT_AFTER_FAILURE_SECONDS = 5.0  # the same where the job has failed anyway
PROBE_SECONDS = 1.0
SCOPE = "murmura/launch"


class Nodes:
    """This host's launcher among those of the others."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._peers = [node for node in range(plan.num_nodes) if node != plan.node_rank]
        self._address = parse_address(plan.coordinator)
        store = _serve(plan) if plan.node_rank == 0 else _reach(plan)
        self._store = under(store, SCOPE)
        if plan.secret:
            self._store = SignedStore(self._store, plan.secret, SCOPE)
        self._looked_at = 0.0
        self._beat_at = 0.0
        self._beats: dict[int, tuple[bytes, float]] = {}  # at node 0, of each other: the last one, and since when
        self._gone: set[int] = set()
        self._hosts: list[str] = []

    def agree(self, number: int) -> Attempt:
        """Wait until the launchers of all hosts are ready for this attempt; a `RendezvousError` if they are not."""
        plan = self._plan
        own = {
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
            told = [self._read_node(number, node) for node in range(plan.num_nodes)]
        except dist.DistError as error:
            raise RendezvousError(
                f"host {plan.node_rank} lost the launcher of host 0 at {plan.coordinator}: its own output says why. "
                f"(torch says: {error})",
                (0,),
            ) from error
        for node, each in enumerate(told):
            for name, option in (("nodes", "--nnodes"), ("restarts", "--max-restarts")):
                if each[name] != own[name]:
                    raise RendezvousError(
                        f"host {node} was started with {option} {each[name]}, host {plan.node_rank} with {own[name]}. "
                        "Start all hosts with the same."
                    )
        self._hosts = [each["host"] for each in told]
        self._beats.clear()
        ranks = [each["ranks"] for each in told]
        return Attempt(
            job=told[0]["job"],
            number=number,
            first_rank=sum(ranks[: plan.node_rank]),
            world_size=sum(ranks),
            master=self._address,
        )

    def has_failure(self, attempt: Attempt) -> bool:
        """Whether the ranks of another host failed, or its launcher went; looks from time to time only.

        This is also the heartbeat, so it is to be asked often, as long as this host's ranks are there.
        """
        if time.monotonic() - self._looked_at < NEWS_SECONDS:
            return False
        self._looked_at = time.monotonic()
        try:
            self._beat(attempt, SILENT_SECONDS)
            return bool(self._store.check([f"{attempt.job}/failed"]))
        except dist.DistError:
            return True

    def tell(self, attempt: Attempt, failure: Failure | None) -> None:
        """Say how this host's ranks ended."""
        try:
            self._tell_of(self._plan.node_rank, attempt, failure)
        except dist.DistError:
            return  # node 0's launcher has gone; nobody can be told

    def settle(self, attempt: Attempt, failure: Failure | None) -> Failure | None:
        """Wait for the other hosts to end, and return the failure that explains all others, wherever it was.

        With a failure they end soon, or are not waited for. Without one they may still be at work, for however long,
        and need the store; one whose launcher dies is a failure.
        """
        self.tell(attempt, failure)
        failures = [failure] if failure else []
        try:
            missing = self._await_ends(attempt)
            for node in self._peers:
                if node not in missing:
                    told = self._store.get(f"{attempt.job}/ended/{node}")
                    if told != b"null":
                        failures.append(Failure.from_json(told))
        except dist.DistError:
            return failure or self._is_gone(0, "The others cannot know how this job ended.")
        except ValueError:
            return failure
        self._leave_last(attempt)
        return gravest(failures)

    def _tell_of(self, node: int, attempt: Attempt, failure: Failure | None) -> None:
        if failure is not None:
            self._store.set(f"{attempt.job}/failed", b"")
        self._store.set(f"{attempt.job}/ended/{node}", "null" if failure is None else failure.to_json())

    def _await_ends(self, attempt: Attempt) -> list[int]:
        """Wait until every host has ended; returns those that have not, some time after a failure."""
        deadline = math.inf
        missing = list(self._peers)
        while missing := [node for node in missing if not self._store.check([f"{attempt.job}/ended/{node}"])]:
            has_failed = deadline < math.inf
            if not has_failed and self._store.check([f"{attempt.job}/failed"]):
                deadline = time.monotonic() + LAST_WORDS_SECONDS + END_AFTER_FAILURE_SECONDS + KILL_SECONDS
            if time.monotonic() > deadline:
                break
            self._beat(attempt, SILENT_AFTER_FAILURE_SECONDS if has_failed else SILENT_SECONDS)
            time.sleep(POLL_SECONDS)
        return missing

    def _leave_last(self, attempt: Attempt) -> None:
        """Node 0 stays until the others have read what they need, for its store goes with it."""
        try:
            self._store.set(f"{attempt.job}/read/{self._plan.node_rank}", b"")
            if self._plan.node_rank == 0:
                self._await(f"{attempt.job}/read", SILENT_SECONDS, but=self._gone)
        except dist.DistError:
            return  # all has been read

    def _beat(self, attempt: Attempt, patience: float) -> None:
        """Say that this launcher lives; node 0 says of those that have not done so for `patience` seconds: failed."""
        now = time.monotonic()
        if now - self._beat_at < NEWS_SECONDS:
            return
        self._beat_at = now
        if self._plan.node_rank != 0:
            self._store.set(f"{attempt.job}/beat/{self._plan.node_rank}", str(now))
            return
        for node in self._peers:
            beat, since = self._read_beat(attempt, node), now
            if node in self._beats and beat == self._beats[node][0]:
                since = self._beats[node][1]
            self._beats[node] = beat, since
            if now - since > patience and not self._store.check([f"{attempt.job}/ended/{node}"]):
                words = f"It has been silent for {patience:.0f} s: it was killed, or its host or the network is down."
                self._tell_of(node, attempt, self._is_gone(node, words))
                self._gone.add(node)

    def _read_beat(self, attempt: Attempt, node: int) -> bytes:
        key = f"{attempt.job}/beat/{node}"
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else b""
        except RendezvousError:  # a stranger's, without the secret
            return b""

    def _is_gone(self, node: int, words: str) -> Failure:
        return Failure(None, f"host {node} ({self._hosts[node]})", 1, words, weight=0, is_gone=True)

    def _await(self, what: str, seconds: float, but: Collection[int] = ()) -> list[int]:
        """Wait until every node has said `what`, `but` for some; returns those that have not by then."""
        deadline = time.monotonic() + seconds
        missing = [node for node in range(self._plan.num_nodes) if node not in but]
        while missing := [node for node in missing if not self._store.check([f"{what}/{node}"])]:
            if time.monotonic() > deadline:
                return missing
            time.sleep(POLL_SECONDS)
        return []

    def _read_node(self, number: int, node: int) -> dict[str, Any]:
        try:
            told = json.loads(self._store.get(f"ready/{number}/{node}"))
            numbers = {name: int(told[name]) for name in ("ranks", "nodes", "restarts")}
            return {**numbers, "job": str(told["job"]), "host": str(told["host"])}
        except (ValueError, TypeError, KeyError) as error:
            raise RendezvousError(
                f"host {self._plan.node_rank} cannot read what host {node} left in the store. {ADVICE}", (node,)
            ) from error


def _serve(plan: LaunchPlan) -> Store:
    host, port = parse_address(plan.coordinator)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    try:
        return make(host, port, plan.num_nodes, True, timedelta(seconds=plan.timeout), wait_for_workers=False)
    except dist.DistError as error:
        raise ConfigError(
            f"host 0 cannot listen at {plan.coordinator}: {error} Is the address this host's, and does another job "
            "use the port? Choose another one, on all hosts."
        ) from error


def _reach(plan: LaunchPlan) -> Store:
    """The store of host 0, for which it is waited here: torch would wait for up to three times as long."""
    host, port = parse_address(plan.coordinator)
    deadline = time.monotonic() + plan.timeout
    while not _is_served(host, port, deadline):
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"host {plan.node_rank} did not reach the launcher of host 0 at {plan.coordinator} within "
                f"{plan.timeout:.1f} s. Was murmura run started there, with the same --coordinator, and is the port "
                "open between the hosts?",
                (0,),
            )
        time.sleep(POLL_SECONDS)
    left = max(1.0, deadline - time.monotonic())
    return open_store(host, port, plan.node_rank, plan.num_nodes, left)


def _is_served(host: str, port: int, deadline: float) -> bool:
    """Whether somebody listens there; asks for a second at most."""
    try:
        socket.create_connection((host, port), max(0.01, min(PROBE_SECONDS, deadline - time.monotonic()))).close()
    except OSError:
        return False
    return True
