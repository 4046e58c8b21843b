"""DDP wires a module, a transport and an algorithm together; it owns no mathematics.

It behaves like torch's DistributedDataParallel unless told otherwise: when `backward()` returns, the algorithm has
done its part. The optimizer, the scheduler, clipping and GradScaler stay the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from murmura.algorithms import Algorithm, AlgorithmImpl, algorithm_named
from murmura.ddp import consensus, replica_checks
from murmura.ddp.replica import ModelReplica
from murmura.ddp.round import Event
from murmura.ddp.round_driver import RoundDriver
from murmura.ddp.wrapping import check_module, refuse_inside_torch_ddp
from murmura.environment import setting_from_env
from murmura.errors import ConfigError, UsageError
from murmura.observe import Observer
from murmura.transports.base import Transport
from murmura.transports.connect import connect
from murmura.types import NonFinite, parse

Batch = TypeVar("Batch")


class DDP(nn.Module):
    """Keeps the replicas of `module` together while they train.

    Every rank wraps the same model; they start from rank 0's parameters and buffers.

    Args:
        module: the model; reached again as `.module`, and calling it directly works too.
        transport: None connects from the environment, and `close` closes that connection; one that is given
            stays the caller's.
        algorithm: an Algorithm or its name; None takes the environment's, else gradient all-reduce.
        bucket_size_bytes: parameters travel together in buckets of at most about this size; a smaller model is cut
            into several all the same, so that they travel while backward goes on.
        broadcast_buffers: whether ranks take over rank 0's buffers at the first forward of a round; algorithms that
            exchange weights average them instead. False leaves buffers to each rank after the start.
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
        super().__init__()
        chosen = _as_algorithm(algorithm)
        nonfinite = parse(NonFinite, nonfinite, "nonfinite")
        _check_numbers(bucket_size_bytes, verify_every)
        if transport is not None and not isinstance(transport, Transport):
            raise ConfigError(
                f"transport={transport!r} is no Transport. Pass what connect() or run_world() gives, or None."
            )
        check_module(module, DDP)
        self.module = module
        self._transport = connect() if transport is None else transport
        try:
            channel = self._transport.channel("ddp").without_listeners()
            self._replica = ModelReplica(module, channel, ignore, broadcast_buffers)
            replica_checks.check_same_model(self._replica.transport, self._replica.describe())
            self._take_over(0)
            self._driver = RoundDriver(
                module,
                self._replica,
                chosen,
                world=self._transport,
                owns_world=transport is None,
                bucket_bytes=bucket_size_bytes,
                broadcasts_buffers=broadcast_buffers,
                verify_every=verify_every,
                nonfinite=nonfinite,
            )
        except BaseException:
            if transport is None:
                self._transport.close()
            raise

    @classmethod
    def with_bucket_size(cls, module: nn.Module, transport: Transport | None, bucket_size_bytes: int) -> Self:
        """DDP with defaults but for the size of a bucket."""
        return cls(module, transport, bucket_size_bytes=bucket_size_bytes)

    # The module

    @property
    def transport(self) -> Transport:
        """The transport given or connected; DDP itself works on a channel of it."""
        return self._transport

    @property
    def backend(self) -> Transport:
        """Another name for `transport`."""
        return self._transport

    @property
    def algorithm(self) -> AlgorithmImpl:
        """The running algorithm."""
        return self._driver.algorithm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped module returns."""
        refuse_inside_torch_ddp()
        if self._driver.closed and self.module.training and torch.is_grad_enabled():
            self._driver.round.check(Event.FORWARD)
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's own: no prefix, so it loads with and without DDP."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the module, or one that torch's DDP saved with its prefix."""
        if assign:
            raise UsageError(
                "load_state_dict(assign=True) would replace the parameters that DDP keeps together. "
                "Leave assign out, or load into the module before wrapping it."
            )
        own = self.module.state_dict().keys()
        if not any(name in own for name in state_dict) and all(name.startswith("module.") for name in state_dict):
            state_dict = {name.removeprefix("module."): value for name, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Loads as a part of another module: a state dict of that has no prefix for this wrapper either."""
        own = f"{prefix}module."
        if not any(name.startswith(own) for name in state_dict):
            for name in [name for name in state_dict if name.startswith(prefix)]:
                state_dict[own + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Synchronising

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it a backward only accumulates and is no round."""
        return self._driver.no_sync()

    def sync_gradients(self) -> None:
        """Run the round that `no_sync` held back, bucket after bucket; a no-op when the round is in sync."""
        self._driver.sync(one_by_one=True)

    def overlapped_sync_gradients(self) -> None:
        """As `sync_gradients`, to the bit, with all buckets in flight."""
        self._driver.sync(one_by_one=False)

    def settle(self) -> None:
        """Do the exchanges that an optimizer's step, skipped on this rank, has left undone. Collective.

        Every method here that needs it does it by itself, and so does every murmura collective. Call it before a
        collective that murmura cannot see, such as torch.distributed's own, where ranks may skip steps one by one.
        Refused while gradients of backwards inside `no_sync` wait for their exchange.
        """
        self._driver.settle_for_good()

    def broadcast_parameters(self, root: int = 0) -> None:
        """Take over parameters and buffers of `root`, in place: optimizers built before stay valid. Collective."""
        self._driver.before_load(self.module)
        self._take_over(root)
        self._driver.after_load(self.module)

    def _take_over(self, root: int) -> None:
        tensors = [*self._replica.parameters, *self._replica.all_buffers]
        self._replica.broadcast(tensors, root, self._replica.transport.allocate)

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate uneven data: a rank out of it replays its last batch with weight 0 until all are done.

        Every rank runs its whole loop as often as the one with the most batches; means are weighted by data.
        """
        return self._driver.joining.batches(loader)

    def verify_in_sync(self) -> None:
        """Raise ReplicaDivergence, naming the first parameter that differs, unless all ranks agree. Collective."""
        self._driver.settling.before_collective()
        self._driver.verify()

    # The algorithm

    def set_algorithm(self, algorithm: Algorithm | str) -> None:
        """Close the running algorithm and go on with another; collective, between rounds."""
        self._driver.switch(_as_algorithm(algorithm))

    def algorithm_state_dict(self) -> dict[str, Any]:
        """All that the running algorithm carries on this rank, and the number of rounds.

        Every rank calls it, between an optimizer's step and the next forward: what waits for a step that was skipped is
        done first. Refused while gradients of backwards inside `no_sync` wait for their exchange.
        """
        self.settle()
        return {
            "name": type(self.algorithm).__name__,
            "round": self._replica.round,
            "plan": self._driver.planner.state_dict(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_algorithm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `algorithm_state_dict` returned on this rank; load the weights before."""
        if state["name"] != type(self.algorithm).__name__:
            raise ConfigError(
                f"this state was saved by {state['name']}, and {type(self.algorithm).__name__} is running. Wrap the "
                "model with the algorithm that was saved, or leave its state out."
            )
        self._driver.settling.settle()
        self._driver.reducer.load_plan(state["plan"])
        self._replica.round = state["round"]
        self.algorithm.load_state_dict(state["algorithm"])

    def remember_optimizer(self, optimizer: Optimizer) -> None:
        """Tell of an optimizer before its first step: a change of algorithm then averages its moments at once.

        Otherwise they are averaged at that step. `Checkpointer` calls it by itself. Collective.
        """
        self._driver.remember(optimizer)

    def consensus_distance(self) -> float:
        """How far the replicas are apart (root mean square distance to their mean); collective, equal on all ranks."""
        self._driver.settling.before_collective()
        return consensus.consensus_distance(self._replica)

    def average_parameters(self) -> AbstractContextManager[None]:
        """Inside it the module holds the mean of all replicas; afterwards each has its own weights back. Collective."""
        self._driver.settling.before_collective()
        return consensus.average_parameters(self._replica)

    def observe(self, observer: Observer | None) -> None:
        """Report to `observer` from now on, None ends it; an `Observer` calls it by itself."""
        self._driver.observe(observer)

    # Life

    def close(self) -> None:
        """Do the exchanges that a skipped step left undone, remove the hooks and end the communication; idempotent.

        Gradients stay usable. Training through the wrapper is refused from then on.
        """
        self._driver.close()

    def into_inner(self) -> nn.Module:
        """Close the wrapper and return the module, free of its hooks."""
        self.close()
        return self.module

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            "a DDP cannot be copied: it holds a place in the order of communication. "
            "Copy its model: copy.deepcopy(ddp.module)."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a DDP cannot be pickled: it holds a transport. Save ddp.state_dict() instead.")


def _as_algorithm(algorithm: Algorithm | str | None) -> Algorithm:
    if algorithm is None:
        algorithm = setting_from_env("algorithm") or "gradient_allreduce"
    if isinstance(algorithm, str):
        return algorithm_named(algorithm)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm={algorithm!r} is no Algorithm. Give an object, such as LocalSGDAlgorithm(8), or a name, such "
            "as 'shift_one'."
        )
    return algorithm


def _check_numbers(bucket_size_bytes: Any, verify_every: Any) -> None:
    for name, value, least in (("bucket_size_bytes", bucket_size_bytes, 1), ("verify_every", verify_every, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name}={value!r} must be a whole number, at least {least}.")
