"""The launchers of several hosts: they number the ranks, start attempts together, and tell each other of failures.

They meet at a fixed address, in a store that node 0's launcher serves as long as the job lasts. What they leave there
is JSON, signed if the job has a secret.
"""

from __future__ import annotations

import json
import platform
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from murmura.config import parse_address
from murmura.errors import ConfigError, RendezvousError
from murmura.launch.crew import END_SECONDS, LAST_WORDS_SECONDS
from murmura.launch.plan import Attempt, LaunchPlan
from murmura.launch.verdict import Failure, gravest
from murmura.transports.rendezvous import Store, open_store, under
from murmura.transports.signed_store import ADVICE, SignedStore

POLL_SECONDS = 0.05
NEWS_SECONDS = 0.5  # between two looks at how the others are doing
LEAVE_SECONDS = 5.0
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
        ranks = [each["ranks"] for each in told]
        return Attempt(
            job=told[0]["job"],
            number=number,
            first_rank=sum(ranks[: plan.node_rank]),
            world_size=sum(ranks),
            master=self._address,
        )

    def has_failure(self, attempt: Attempt) -> bool:
        """Whether the ranks of another host failed, or its launcher went; looks from time to time only."""
        if time.monotonic() - self._looked_at < NEWS_SECONDS:
            return False
        self._looked_at = time.monotonic()
        try:
            return any(self._store.check([f"{attempt.job}/failed/{node}"]) for node in self._peers)
        except dist.DistError:
            return True

    def tell(self, attempt: Attempt, failure: Failure | None) -> None:
        """Say how this host's ranks ended."""
        name = self._plan.node_rank
        try:
            if failure is not None:
                self._store.set(f"{attempt.job}/failed/{name}", b"")
            self._store.set(f"{attempt.job}/ended/{name}", "null" if failure is None else failure.to_json())
        except dist.DistError:
            return  # node 0's launcher has gone; nobody can be told

    def settle(self, attempt: Attempt, failure: Failure | None) -> Failure | None:
        """Wait for the other hosts to end, and return the failure that explains all others, wherever it was.

        With a failure they end soon, or are not waited for. Without one they may still be at work, and need the store.
        """
        self.tell(attempt, failure)
        failures = [failure] if failure else []
        try:
            soon = LAST_WORDS_SECONDS + END_SECONDS
            missing = self._await(f"{attempt.job}/ended", self._plan.timeout if failure is None else soon)
            for node in self._peers:
                if node not in missing:
                    told = self._store.get(f"{attempt.job}/ended/{node}")
                    if told != b"null":
                        failures.append(Failure.from_json(told))
            self._leave_last(attempt)
        except (dist.DistError, ValueError):
            return failure
        return gravest(failures)

    def _leave_last(self, attempt: Attempt) -> None:
        """Node 0 stays until the others have read what they need, for its store goes with it."""
        self._store.set(f"{attempt.job}/read/{self._plan.node_rank}", b"")
        if self._plan.node_rank == 0:
            self._await(f"{attempt.job}/read", LEAVE_SECONDS)

    def _await(self, what: str, seconds: float) -> list[int]:
        """Wait until every node has said `what`; returns those that have not by then."""
        deadline = time.monotonic() + seconds
        missing = list(range(self._plan.num_nodes))
        while missing := [node for node in missing if not self._store.check([f"{what}/{node}"])]:
            if time.monotonic() > deadline:
                return missing
            time.sleep(POLL_SECONDS)
        return []

    def _read_node(self, number: int, node: int) -> dict[str, Any]:
        try:
            told = json.loads(self._store.get(f"ready/{number}/{node}"))
            numbers = {name: int(told[name]) for name in ("ranks", "nodes", "restarts")}
            return {**numbers, "job": str(told["job"])}
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
    host, port = parse_address(plan.coordinator)
    return open_store(host, port, plan.node_rank, plan.num_nodes, plan.timeout)
