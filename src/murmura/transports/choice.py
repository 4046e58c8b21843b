"""Which transport a world takes, as a pure function of what its ranks say of themselves when they sign in.

Every rank computes it from the same claims, so all come to the same choice, or raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from murmura.errors import ConfigError, RendezvousError
from murmura.transports.checks import Check
from murmura.types import TransportKind

__all__ = ["Choice", "Claim", "choose", "disagreement"]


@dataclass(frozen=True)
class Claim:
    """What a rank says of itself when it signs in.

    Attributes:
        transport: the kind that it was told to take; AUTO leaves it to `choose`.
        source: who told it, in words: "MURMURA_TRANSPORT".
        device: the type of the device that its tensors are on.
        gpu: what identifies that device on its host, if it is a GPU that NCCL can use; else empty.
        check: when it compares the calls of the ranks.
    """

    transport: TransportKind = TransportKind.AUTO
    source: str = ""
    device: str = "cpu"
    gpu: str = ""
    check: Check = Check.BEST_EFFORT

    def to_text(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def from_text(cls, text: str, rank: int) -> Claim:
        """Read what rank `rank` said; a `RendezvousError` if it is no claim."""
        try:
            transport, source, device, gpu, check = json.loads(text)
            return cls(TransportKind(transport), str(source), str(device), str(gpu), Check(check))
        except (ValueError, TypeError, RecursionError):
            raise RendezvousError(
                f"rank {rank} signed in with {text!r}, which this version of murmura does not understand. Install the "
                "same version on all hosts.",
                (rank,),
            ) from None


@dataclass(frozen=True)
class Choice:
    """The transport that a world takes, and the reason in words."""

    kind: TransportKind
    why: str


def choose(claims: Sequence[Claim], hosts: Sequence[int], *, group: str | None = None) -> Choice:
    """Choose for ranks with these `claims`, rank r on the host of index hosts[r].

    `group` is the backend that the user's process group has for the ranks' device, "" if it has none; None means
    that there is no such group. Raises `ConfigError` if the ranks disagree, or want what their hosts do not allow.
    """
    error = disagreement(claims)
    if error is not None:
        raise error
    first, world_size, num_hosts = claims[0], len(claims), len(set(hosts))
    where = "one host" if num_hosts == 1 else f"{num_hosts} hosts"
    if first.transport is not TransportKind.AUTO:
        _refuse_impossible(first.transport, hosts)
        return Choice(first.transport, f"{first.source} asks for it")
    if world_size == 1:
        return Choice(TransportKind.IN_PROCESS, "the world has one rank")
    if first.device == "cuda":
        if group == "nccl":
            return Choice(TransportKind.NCCL, "the process group is one of NCCL and the parameters are on CUDA")
        if group is None and _has_a_gpu_each(claims, hosts):
            return Choice(TransportKind.NCCL, f"{world_size} ranks on {where} have a GPU each")
        where = f"{where}, {_why_not_nccl(claims, group)}"
    if num_hosts == 1:
        return Choice(TransportKind.SHARED_MEMORY, f"{world_size} {first.device} ranks on {where}")
    if num_hosts < world_size:
        return Choice(TransportKind.HIERARCHICAL, f"{world_size} {first.device} ranks on {where}")
    return Choice(TransportKind.GLOO, f"{world_size} {first.device} ranks on {where}, one on each")


def _why_not_nccl(claims: Sequence[Claim], group: str | None) -> str:
    if group is not None:
        return "whose process group is not one of NCCL"
    if not all(claim.gpu for claim in claims):
        return "not all of which have CUDA, NCCL and an address to meet at"
    return "of which several share a GPU"


def _has_a_gpu_each(claims: Sequence[Claim], hosts: Sequence[int]) -> bool:
    gpus = {(host, claim.gpu) for host, claim in zip(hosts, claims, strict=True) if claim.gpu}
    return len(gpus) == len(claims)


def disagreement(claims: Sequence[Claim | None]) -> ConfigError | None:
    """The error if the ranks were told different things; None stands for a rank that has said nothing yet."""
    error = _unequal(
        claims,
        lambda claim: str(claim.transport),
        lambda claim: f"transport='{claim.transport}'" + (f" (by {claim.source})" if claim.source else ""),
        "Set MURMURA_TRANSPORT, or transport=, to the same on all ranks.",
    )
    error = error or _unequal(
        claims, lambda claim: claim.check, lambda claim: f"check='{claim.check}'", "Pass the same on all ranks."
    )
    if error is None and all(claim and claim.transport in (TransportKind.AUTO, TransportKind.NCCL) for claim in claims):
        error = _unequal(
            claims,
            lambda claim: claim.device,
            lambda claim: f"tensors on '{claim.device}'",
            "Move the model to the same kind of device on all ranks; if they shall differ, ask for "
            "transport='shared_memory' or 'gloo', which bring every tensor to the host.",
        )
    return error


def _unequal(
    claims: Sequence[Claim | None], key: Callable[[Claim], str], describe: Callable[[Claim], str], remedy: str
) -> ConfigError | None:
    """The error that names who said what, if they differ in `key`."""
    camps: dict[str, list[int]] = {}
    for rank, claim in enumerate(claims):
        if claim is not None:
            camps.setdefault(describe(claim), []).append(rank)
    if len({key(claim) for claim in claims if claim is not None}) <= 1:
        return None
    told = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {what}" for what, ranks in camps.items()
    )
    return ConfigError(f"the ranks do not agree on how to connect. {told}. {remedy}")


def _refuse_impossible(kind: TransportKind, hosts: Sequence[int]) -> None:
    if kind is TransportKind.SHARED_MEMORY and len(set(hosts)) > 1:
        raise ConfigError(
            f"transport='shared_memory' joins the processes of one host, but the {len(hosts)} ranks are on "
            f"{len(set(hosts))}. Use transport='hierarchical', which shares memory inside each host."
        )
