"""Before the first tensor moves, each rank proves to every other, over the connection between them, that it knows the
job's secret.

The question is fresh, so that no earlier answer fits; the answer names both ranks, so that none can be handed on.
"""

from __future__ import annotations

import hmac
import secrets

from murmura.errors import RendezvousError, TransportError
from murmura.transports.base import Transport
from murmura.transports.objects import exchange_bytes
from murmura.transports.signed_store import ADVICE, TAG_BYTES, SignedStore

NONCE_BYTES = 32


def prove_to_each_other(transport: Transport, store: SignedStore) -> None:
    """A `RendezvousError` names the ranks that do not know the secret of `store`, or do not answer."""
    rank = transport.rank
    peers = [peer for peer in range(transport.world_size) if peer != rank]
    own = {peer: secrets.token_bytes(NONCE_BYTES) for peer in peers}
    try:
        asked = exchange_bytes(transport, own, NONCE_BYTES)
        answers = {peer: _answer(store, rank, peer, asked[peer], own[peer]) for peer in peers}
        heard = exchange_bytes(transport, answers, TAG_BYTES)
    except TransportError as error:
        missing = () if error.peer is None else (error.peer,)
        raise RendezvousError(
            f"rank {rank} asked the others to prove that they know the job's secret, and not all answered: {error} "
            f"{ADVICE}",
            missing,
        ) from error
    strangers = [
        peer
        for peer in peers
        if not hmac.compare_digest(heard[peer], _answer(store, peer, rank, own[peer], asked[peer]))
    ]
    if strangers:
        named = ", ".join(map(str, strangers))
        raise RendezvousError(
            f"rank {rank} sent no tensor to rank{'s' if len(strangers) > 1 else ''} {named}: whoever answers there "
            f"does not know the job's secret. {ADVICE}",
            tuple(strangers),
        )


def _answer(store: SignedStore, prover: int, verifier: int, asked: bytes, own: bytes) -> bytes:
    return store.sign(b"answer", b"%d to %d" % (prover, verifier), asked, own)
