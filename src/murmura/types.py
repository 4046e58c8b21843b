"""The enums of the library and the one protocol that collectives are written against.

Enums are strings: ``ReduceOp.MEAN == "mean"``, and every public function takes either. Strings become enums at
the edge, through `parse`, which names the known values when it meets an unknown one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from murmura.errors import ConfigError

__all__ = [
    "DistributedBackend",
    "DistributedRole",
    "Exchanges",
    "NonFinite",
    "PeerSelection",
    "PointToPoint",
    "ReduceOp",
    "Streaming",
    "TransportKind",
    "parse",
]


class ReduceOp(StrEnum):
    """How the values of the ranks become one."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


class DistributedRole(StrEnum):
    """What a rank does in its world: rank 0 coordinates, the others work."""

    COORDINATOR = "coordinator"
    WORKER = "worker"


class DistributedBackend(StrEnum):
    """Where a worker computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(StrEnum):
    """How a tensor gets from rank to rank."""

    AUTO = "auto"
    IN_PROCESS = "in_process"
    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    NCCL = "nccl"
    HIERARCHICAL = "hierarchical"


class Exchanges(StrEnum):
    """What an algorithm exchanges between replicas."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    MOMENTA = "momenta"


class PeerSelection(StrEnum):
    """With whom decentralised averaging takes place."""

    ALL = "all"
    SHIFT_ONE = "shift_one"


class NonFinite(StrEnum):
    """What DDP does about a gradient that holds an infinity or a NaN."""

    PASS = "pass"
    RAISE = "raise"
    SKIP_STEP = "skip_step"


E = TypeVar("E", bound=StrEnum)


def parse(enum: type[E], value: str, what: str) -> E:
    """Return the member of `enum` that `value` names; `what` is the setting's name, for the error."""
    try:
        return enum(value)
    except ValueError:
        known = ", ".join(repr(str(member)) for member in enum)
        raise ConfigError(f"{what}={value!r} is unknown. Known: {known}.") from None


class PointToPoint(Protocol):
    """What a collective needs of a transport: a rank, a number of ranks, and one exchange.

    `exchange` sends each tensor of `sends` to its rank and fills each tensor of `recvs` from its rank, all at
    once, and returns when every one of them is done. Between two ranks messages arrive in the order they were sent.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        recvs: Sequence[tuple[Tensor, int]],
        *,
        timeout: float | None = None,
    ) -> object: ...


@runtime_checkable
class Streaming(Protocol):
    """A transport that hands over a long message in parts, so that they can be worked on while the rest travels."""

    def stream(
        self, outgoing: Tensor, dst: int, incoming: Tensor, src: int, *, timeout: float | None = None
    ) -> Iterator[tuple[int, int]]:
        """Exchange two flat tensors; yield the bounds of each part of `incoming` when it has come, in order."""
        ...
