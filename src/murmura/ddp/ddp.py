"""DDP wires a module, a transport and an algorithm together; it owns no mathematics.

It behaves like torch's DistributedDataParallel unless told otherwise: when `backward()` returns, the
algorithm has done its part. The optimizer, the scheduler, clipping and GradScaler stay the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch import nn

from murmura.errors import not_built

if TYPE_CHECKING:
    from murmura.algorithms import Algorithm, AlgorithmImpl
    from murmura.transports.base import Transport
    from murmura.types import NonFinite

Batch = TypeVar("Batch")


class DDP(nn.Module):
    """Keeps the replicas of `module` together while they train.

    Args:
        module: the model; reached again as `.module`, and calling it directly works too.
        transport: None connects from the environment, and `close` closes that connection; one that is given
            stays the caller's.
        algorithm: an Algorithm or its name; None takes the environment's, else gradient all-reduce.
        bucket_size_bytes: parameters travel together in buckets of about this size.
        broadcast_buffers: whether ranks take over rank 0's buffers before a forward.
        ignore: names of parameters and buffers that stay local.
        verify_every: run `verify_in_sync` every so many rounds; 0 is never.
        nonfinite: "pass", "raise" or "skip_step", when a gradient holds an infinity or a NaN.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        transport: Transport | None = None,
        *,
        algorithm: Algorithm | str | None = None,
        bucket_size_bytes: int = 25 * 2**20,
        broadcast_buffers: bool = True,
        ignore: Collection[str] = (),
        verify_every: int = 0,
        nonfinite: NonFinite | str = "pass",
    ) -> None:
        not_built("murmura.DDP")

    @classmethod
    def with_bucket_size(cls, module: nn.Module, transport: Transport | None, bucket_size_bytes: int) -> Self:
        """DDP with defaults but for the size of a bucket."""
        not_built("murmura.DDP.with_bucket_size")

    @property
    def transport(self) -> Transport:
        """The transport given or connected; DDP itself works on a channel of it."""
        not_built("murmura.DDP.transport")

    @property
    def backend(self) -> Transport:
        """Another name for `transport`."""
        not_built("murmura.DDP.backend")

    @property
    def algorithm(self) -> AlgorithmImpl:
        """The running algorithm."""
        not_built("murmura.DDP.algorithm")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped module returns."""
        not_built("murmura.DDP.forward")

    def into_inner(self) -> nn.Module:
        """Close the wrapper and return the module, free of its hooks."""
        not_built("murmura.DDP.into_inner")

    def close(self) -> None:
        """Remove the hooks and end the communication; idempotent."""
        not_built("murmura.DDP.close")

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it a backward only accumulates and is no round."""
        not_built("murmura.DDP.no_sync")

    def sync_gradients(self) -> None:
        """Run the round that `no_sync` held back, bucket after bucket; a no-op when the round is in sync."""
        not_built("murmura.DDP.sync_gradients")

    def overlapped_sync_gradients(self) -> None:
        """As `sync_gradients`, to the bit, with all buckets in flight."""
        not_built("murmura.DDP.overlapped_sync_gradients")

    def broadcast_parameters(self, root: int = 0) -> None:
        """Take over parameters and buffers of `root`, in place: optimizers built before stay valid."""
        not_built("murmura.DDP.broadcast_parameters")

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate uneven data: a rank out of it replays its last batch with weight 0 until all are done."""
        not_built("murmura.DDP.join")

    def verify_in_sync(self) -> None:
        """Raise ReplicaDivergence, naming the first parameter that differs, unless all ranks agree."""
        not_built("murmura.DDP.verify_in_sync")

    def set_algorithm(self, algorithm: Algorithm | str) -> None:
        """Close the running algorithm and go on with another; collective, between rounds."""
        not_built("murmura.DDP.set_algorithm")

    def algorithm_state_dict(self) -> dict[str, Any]:
        """All that the running algorithm carries on this rank."""
        not_built("murmura.DDP.algorithm_state_dict")

    def load_algorithm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `algorithm_state_dict` returned on this rank."""
        not_built("murmura.DDP.load_algorithm_state_dict")

    def consensus_distance(self) -> float:
        """How far the replicas are apart; collective, equal on all ranks."""
        not_built("murmura.DDP.consensus_distance")

    def average_parameters(self) -> AbstractContextManager[None]:
        """Inside it the module holds the mean of all replicas; afterwards each has its own weights back."""
        not_built("murmura.DDP.average_parameters")
