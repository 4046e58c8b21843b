"""The ranks of a world meet in a store, choose their transport together, and join it."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import torch

from murmura.transports.base import Transport
from murmura.transports.checks import Check
from murmura.transports.choice import Choice, Claim, choose
from murmura.transports.hierarchical import HierarchicalTransport
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import Roster, Store, sign_in, under
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.transports.signed_store import SignedStore
from murmura.transports.user_group import UserGroup
from murmura.transports.watched_store import Watch, nobody
from murmura.types import TransportKind

log = logging.getLogger("murmura")


@dataclass(frozen=True, kw_only=True)
class StoreRendezvous:
    """A rank's place in the rendezvous, and the options of the transport that it joins there.

    Attributes:
        store: the store; the rendezvous uses the part of it that begins with `scope`.
        where: says in words where the ranks meet.
        secret: signs what the ranks write, unless it is empty.
        gpu: the number of the GPU that this rank uses, if it uses one.
        between: the transport between hosts of a hierarchical transport.
        group: the user's process group, if one brought the ranks together.
        watch: tells of ranks that cannot come any more.
    """

    store: Store
    scope: str
    where: str
    rank: int
    world_size: int
    timeout: float
    secret: str = ""
    check: Check = Check.BEST_EFFORT
    gpu: int | None = None
    between: TransportKind = TransportKind.GLOO
    group: UserGroup | None = None
    watch: Watch = nobody

    def choose_and_join(self, claim: Claim) -> Transport:
        """Sign in, choose with the others, and join what was chosen."""
        job = self._job()
        roster = sign_in(job, self.rank, self.world_size, self.timeout, watch=self.watch, claim=claim.to_text())
        claims = [Claim.from_text(text, rank) for rank, text in enumerate(roster.claims)]
        backend = None if self.group is None else self.group.backend_name(claim.device)
        choice = choose(claims, roster.hosts, group=backend)
        if choice.kind is TransportKind.SHARED_MEMORY:
            log_choice(choice, self.rank, self.world_size, self.where)
            return SharedMemoryTransport.join(
                roster.token, self.rank, self.world_size, timeout=self.timeout, secret=self.secret
            )
        if choice.kind is TransportKind.NCCL and self.group is not None and backend == "nccl":
            log_choice(choice, self.rank, self.world_size, self.where)
            with on_gpu(self.gpu):
                nccl = self.group.backend("cuda")
                return ProcessGroupTransport(nccl, check=self.check, timeout=self.timeout, roster=roster)
        return self.join(choice, roster)

    def join(self, choice: Choice, roster: Roster | None = None) -> Transport:
        """Join the transport that the ranks have chosen, one over a network; `roster` if they have signed in here."""
        log_choice(choice, self.rank, self.world_size, self.where)
        job = self._job() if roster is None else roster.store
        if choice.kind is TransportKind.HIERARCHICAL:
            return HierarchicalTransport.join(
                job, self.rank, self.world_size, kind=self.between, check=self.check, timeout=self.timeout
            )
        with on_gpu(self.gpu if choice.kind is TransportKind.NCCL else None):
            return ProcessGroupTransport.join(
                job,
                self.rank,
                self.world_size,
                kind=choice.kind,
                check=self.check,
                timeout=self.timeout,
                roster=roster,
            )

    def _job(self) -> Store:
        job = under(self.store, self.scope)
        return SignedStore(job, self.secret, self.scope) if self.secret else job


def on_gpu(number: int | None) -> contextlib.AbstractContextManager[None]:
    """Make the GPU of this number torch's current one; None changes nothing."""
    return contextlib.nullcontext() if number is None else torch.cuda.device(number)


def log_choice(choice: Choice, rank: int, world_size: int, where: str) -> None:
    """Log which transport was taken, and why."""
    log.info("rank %d of %d takes transport '%s': %s. They met %s.", rank, world_size, choice.kind, choice.why, where)
