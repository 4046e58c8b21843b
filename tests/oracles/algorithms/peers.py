"""Who meets whom when replicas meet in pairs, written as a table of meetings."""

from __future__ import annotations


def shift_one(size: int, meeting: int) -> list[int]:
    """The peer of each rank at the given meeting; a rank that is its own peer sits out."""
    peers = list(range(size))
    if size % 2 == 0:
        half = size // 2
        for lower in range(half):
            upper = half + (meeting + lower) % half
            peers[lower], peers[upper] = upper, lower
        return peers
    for rank in range(size):
        peers[rank] = (meeting - rank) % size
    return peers
