"""Who meets whom when replicas meet in pairs, written as a table of exchanges."""

from __future__ import annotations


def shift_one(size: int, number: int) -> list[int]:
    """The peer of each rank in exchange `number`; a rank that is its own peer sits out."""
    peers = list(range(size))
    if size % 2 == 0:
        half = size // 2
        for lower in range(half):
            upper = half + (number + lower) % half
            peers[lower], peers[upper] = upper, lower
        return peers
    for rank in range(size):
        peers[rank] = (number - rank) % size
    return peers
