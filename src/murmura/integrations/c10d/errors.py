"""The errors of the backend: murmura's own, which are torch's as well.

Programs written for torch.distributed catch `RuntimeError` or `torch.distributed.DistBackendError`; programs written
for murmura catch `PeerLost`. An error that leaves a process group is both.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from murmura.errors import CollectiveMismatch, PeerLost, PeerTimeout, TransportClosed, TransportError


class _OfGroup:
    """An error that can be pickled under the name of another class: process pools and Ray send errors so."""

    def __reduce__(self) -> tuple[Any, ...]:
        ours = next(ours for ours, both in _KINDS.items() if isinstance(self, both))
        return _restored, (ours, self.args, vars(self))  # type: ignore[attr-defined]


class GroupPeerLost(_OfGroup, PeerLost, dist.DistBackendError):
    """`PeerLost`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "PeerLost"


class GroupPeerTimeout(_OfGroup, PeerTimeout, dist.DistBackendError):
    """`PeerTimeout`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "PeerTimeout"


class GroupClosed(_OfGroup, TransportClosed, dist.DistBackendError):
    """`TransportClosed`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "TransportClosed"


class GroupError(_OfGroup, TransportError, dist.DistBackendError):
    """`TransportError`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "TransportError"


class GroupMismatch(_OfGroup, CollectiveMismatch, dist.DistBackendError):
    """`CollectiveMismatch`, for torch; tracebacks show it under that name."""

    __module__, __qualname__ = "murmura.errors", "CollectiveMismatch"


_KINDS: dict[type[BaseException], type[BaseException]] = {
    PeerLost: GroupPeerLost,
    PeerTimeout: GroupPeerTimeout,
    TransportClosed: GroupClosed,
    TransportError: GroupError,
    CollectiveMismatch: GroupMismatch,
}
for _ours, _both in _KINDS.items():
    _both.__name__ = _ours.__name__


def as_torch_error(error: BaseException) -> BaseException:
    """Make an error of a transport one of torch's, too; the same object, so that cause and traceback are kept."""
    kind = _KINDS.get(type(error))
    if kind is not None:
        error.__class__ = kind
    return error


def _restored(ours: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = ours(*args)
    vars(error).update(state)
    return as_torch_error(error)
