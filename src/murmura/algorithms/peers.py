"""Who meets whom: pure functions, so that both sides of an exchange come to the same answer."""

from __future__ import annotations


def shift_one_peer(rank: int, world_size: int, step: int) -> int:
    """The peer of `rank` in communication number `step` of one-peer averaging; the rank itself means: sit out.

    It is symmetric. An even world is two halves: in world_size / 2 steps every rank meets every rank of the other
    half. In an odd world every pair meets, and every rank sits out, once in world_size steps.
    """
    if world_size % 2:
        return (step - rank) % world_size
    half = world_size // 2
    if rank < half:
        return half + (step + rank) % half
    return (rank - half - step) % half


def ring_neighbours(rank: int, world_size: int) -> tuple[int, int]:
    """The ranks to the left and to the right; one rank twice in a world of two."""
    return (rank - 1) % world_size, (rank + 1) % world_size
