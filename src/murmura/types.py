"""The enums of the library.

Enums are strings: ``ReduceOp.MEAN == "mean"``, and every public function takes either. Strings become enums at
the edge, through `parse`, which names the known values when it meets an unknown one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from murmura.errors import ConfigError

__all__ = [
    "DistributedBackend",
    "DistributedRole",
    "Exchanges",
    "NonFinite",
    "PeerSelection",
    "ReduceOp",
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
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


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
