"""The errors of the backend: murmura's own, which are torch's as well.

Programs written for torch.distributed catch `RuntimeError` or `torch.distributed.DistBackendError`; programs written
for murmura catch `PeerLost`. An error that leaves a process group is both.
"""

from __future__ import annotations

import torch.distributed as dist

from murmura.errors import CollectiveMismatch, PeerLost, PeerTimeout, TransportClosed, TransportError


class GroupPeerLost(PeerLost, dist.DistBackendError):
    """`PeerLost`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "PeerLost"


class GroupPeerTimeout(PeerTimeout, dist.DistBackendError):
    """`PeerTimeout`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "PeerTimeout"


class GroupClosed(TransportClosed, dist.DistBackendError):
    """`TransportClosed`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "TransportClosed"


class GroupError(TransportError, dist.DistBackendError):
    """`TransportError`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "TransportError"


class GroupMismatch(CollectiveMismatch, dist.DistBackendError):
    """`CollectiveMismatch`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "CollectiveMismatch"


_KINDS: dict[type[BaseException], type[BaseException]] = {
    PeerLost: GroupPeerLost,
    PeerTimeout: GroupPeerTimeout,
    TransportClosed: GroupClosed,
    TransportError: GroupError,
    CollectiveMismatch: GroupMismatch,
}


def as_torch_error(error: BaseException) -> BaseException:
    """Make an error of a transport one of torch's, too; the same object, so that cause and traceback are kept."""
    kind = _KINDS.get(type(error))
    if kind is not None:
        error.__class__ = kind
    return error
