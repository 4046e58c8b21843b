"""DDP wires a module, a transport and an algorithm together; it owns no mathematics.

It behaves like torch's DistributedDataParallel unless told otherwise: when `backward()` returns, the algorithm has
done its part. The optimizer, the scheduler, clipping and GradScaler stay the user's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from murmura.algorithms import Algorithm, AlgorithmImpl
from murmura.algorithms.checks import at_least, check_fields
from murmura.algorithms.names import PLAIN, as_algorithm
from murmura.ddp import consensus, replica_checks
from murmura.ddp.options import check_options
from murmura.ddp.replica import ModelReplica
from murmura.ddp.round import Event, Phase
from murmura.ddp.round_driver import RoundDriver
from murmura.ddp.torch_arguments import DEFAULT_BUCKET_BYTES, ignored_names, moved, split_positional
from murmura.ddp.torch_surface import TorchSurface
from murmura.ddp.wrapping import check_module, refuse_inside_torch_ddp
from murmura.environment import setting_from_env
from murmura.errors import ConfigError
from murmura.observe import Observer
from murmura.transports.base import Transport
from murmura.transports.connect import transport_for
from murmura.types import NonFinite

Batch = TypeVar("Batch")


class DDP(TorchSurface):
    """Keeps the replicas of `module` together while they train.

    Every rank wraps the same model; they start from rank 0's parameters and buffers. The arguments from
    `process_group` on are those of torch's DistributedDataParallel.

    Args:
        module: the model; reached again as `.module`, and calling it directly works too.
        transport: None connects as the environment says, and `close` closes that connection; one that is given
            stays the caller's. A list is taken as torch's `device_ids`.
        algorithm: an Algorithm or its name, the same on all ranks; None takes that of the config that `transport` was
            connected by, else the environment's, else gradient all-reduce.
        bucket_size_bytes: parameters travel together in buckets of at most about this size; a smaller model is cut
            into several all the same, so that they travel while backward goes on.
        broadcast_buffers: whether ranks take over rank 0's buffers at the start and at the first forward of a round;
            algorithms that exchange weights average them instead. False leaves buffers to each rank.
        ignore: names of parameters and buffers that stay local.
        verify_every: run `verify_in_sync` every so many rounds; 0 is never.
        nonfinite: "pass", "raise" or "skip_step", when a gradient holds an infinity or a NaN.
        process_group: a group of torch.distributed whose ranks hold the replicas.
        device_ids: None or one GPU, on which the model is; `forward` moves inputs there.
        output_device: None, or the same GPU.
        dim: 0; no input is scattered.
        bucket_cap_mb: `bucket_size_bytes` in MiB.
        bucket_cap_mb_list: the sizes of the first buckets in MiB; the last one is that of all others, too.
        find_unused_parameters: accepted; unused parameters are always found.
        gradient_as_bucket_view: False copies gradients out of the buckets, which costs their memory once more.
        static_graph: accepted; nothing depends on it.
        mixed_precision: refused; use torch.autocast and a compressor.
        device_mesh: a mesh of one dimension, instead of `process_group`.
        init_sync: False starts from each rank's own weights, which must be equal already.
        forward_sync_buffers: as `broadcast_buffers`, but buffers are rank 0's at the start in any case.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        transport: Transport | Sequence[Any] | None = None,
        *,
        algorithm: Algorithm | str | None = None,
        bucket_size_bytes: int = DEFAULT_BUCKET_BYTES,
        broadcast_buffers: bool = True,
        ignore: Collection[str] = (),
        verify_every: int = 0,
        nonfinite: NonFinite | str = "pass",
        process_group: Any = None,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        init_sync: bool = True,
        forward_sync_buffers: bool | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        given, device_ids = split_positional(transport, device_ids)
        chosen = _given_or_default(algorithm, given)
        arguments, bucket_bytes, on_nonfinite = check_options(
            bucket_size_bytes=bucket_size_bytes,
            broadcast_buffers=broadcast_buffers,
            ignore=ignore,
            verify_every=verify_every,
            nonfinite=nonfinite,
            process_group=process_group,
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            init_sync=init_sync,
            forward_sync_buffers=forward_sync_buffers,
            **others,
        )
        check_module(module, DDP)
        arguments.check_for(module)
        arguments.check_start(chosen)
        self.module = module
        self.forward_sync_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.parameters_to_ignore = ignored_names(module, ignore)
        self._show_arguments(arguments, bucket_bytes)
        self._input_device = arguments.input_device(module)
        self._transport = transport_for(module, transport=given, process_group=arguments.group)
        try:
            channel = self._transport.channel("ddp").without_listeners()
            self._replica = ModelReplica(module, channel, self.parameters_to_ignore, self.forward_sync_buffers)
            replica_checks.check_on_one_gpu(channel, self._replica.by_name)
            replica_checks.check_same_model(self._replica.transport, self._replica.describe(), chosen)
            if init_sync:
                self._replica.take_over(0, buffers=self.forward_sync_buffers or forward_sync_buffers is not None)
            self._driver = RoundDriver(
                module,
                self._replica,
                chosen,
                world=self._transport,
                owns_world=given is None,
                bucket_bytes=bucket_bytes,
                broadcasts_buffers=self.forward_sync_buffers,
                verify_every=verify_every,
                nonfinite=on_nonfinite,
                gradients_are_views=gradient_as_bucket_view,
            )
        except BaseException:
            if given is None:
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
        if self._input_device is not None:
            args, kwargs = moved(args, self._input_device), moved(kwargs, self._input_device)
        return self.module(*args, **kwargs)

    # Synchronising

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside it a backward only accumulates and is no round."""
        return self._driver.backward.no_sync()

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

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of backwards inside `no_sync` wait for their exchange."""
        return self._driver.round.phase is Phase.ACCUMULATED and self._replica.has_gradients()

    def sync_buffers(self) -> None:
        """Take over rank 0's buffers now, as the next round would; nothing if buffers are each rank's own. Collective.

        Algorithms that exchange weights average buffers instead.
        """
        if self._replica.buffers:
            self._replica.broadcast(self._replica.buffers, 0)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Take over parameters and buffers of `root`, in place: optimizers built before stay valid. Collective."""
        self._driver.take_over(root)

    @overload
    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]: ...
    @overload
    def join(
        self,
        loader: None = None,
        *,
        divide_by_initial_world_size: bool = ...,
        enable: bool = ...,
        throw_on_early_termination: bool = ...,
    ) -> AbstractContextManager[None]: ...
    def join(
        self,
        loader: Any = None,
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """Train on uneven data: `for batch in ddp.join(loader)`, or torch's `with ddp.join()`.

        With a loader, a rank out of data replays its last batch with weight 0 until all are done. Every rank runs its
        whole loop as often as the one with the most batches; means are weighted by data. It works for every algorithm,
        and takes none of the options.

        Without one it is the context manager of torch's DistributedDataParallel: a rank that has left the block takes
        part in the others' rounds with zeros, and at the end all hold the weights of the last. Gradient algorithms
        only.

        Args:
            loader: the batches of this rank, or None.
            divide_by_initial_world_size: whether means divide by all ranks, or by those that are still in the block.
            enable: False makes the block do nothing.
            throw_on_early_termination: whether all ranks raise as soon as one has left the block.
        """
        options = (divide_by_initial_world_size, enable, throw_on_early_termination)
        if loader is None:
            return self._driver.joining.context(*options)
        if options != (True, True, False):
            raise ConfigError("join(loader) takes no options: they are for join() without a loader, as torch has it.")
        return self._driver.joining.batches(loader)

    def verify_in_sync(self) -> None:
        """Raise ReplicaDivergence, naming the first parameter that differs, unless all ranks agree. Collective."""
        self._driver.settling.before_collective()
        self._driver.verify()

    # The algorithm

    def set_algorithm(self, algorithm: Algorithm | str) -> None:
        """Close the running algorithm and go on with another; collective, between rounds."""
        self._driver.switch(_given_or_default(algorithm))

    def algorithm_state_dict(self) -> dict[str, Any]:
        """All that the running algorithm carries on this rank, and the number of rounds.

        Every rank calls it, between an optimizer's step and the next forward, and before `state_dict`: what waits for a
        step that was skipped is done first, and may change weights and moments. Refused while gradients of backwards
        inside `no_sync` wait for their exchange.
        """
        self.settle()
        return self.unsettled_algorithm_state_dict()

    def unsettled_algorithm_state_dict(self) -> dict[str, Any]:
        """As `algorithm_state_dict`, without `settle`: allowed while `is_accumulating`, when nothing else is pending.

        The gradients accumulated so far are not part of it.
        """
        return {
            "name": type(self.algorithm).__name__,
            "round": self._replica.round,
            "plan": self._driver.planner.state_dict(),
            "trained": self._driver.trained.state_dict(),
            "moments": self._replica.moments_state(),
            "algorithm": self.algorithm.state_dict(),
        }

    def load_algorithm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `algorithm_state_dict` returned on this rank. Collective.

        Load the weights before it, and call `remember_optimizer` afterwards.

        The same parameters take part as in the run that was saved: one that was frozen when this model was wrapped
        counts as frozen since.
        """
        self.check_algorithm_state(state)
        self._driver.settling.settle()  # ranks that have stepped wait for it
        if self.algorithm.in_step:
            replica_checks.check_same_round(self._replica.transport, state["round"])
        self._driver.reducer.load_plan(state["plan"])
        self._driver.trained.load_state_dict(state.get("trained"), self.algorithm)
        self._replica.round = state["round"]
        self.algorithm.load_state_dict(state["algorithm"])
        if "moments" in state:  # older states have none
            self._replica.load_moments_state(state["moments"])
        self._driver.after_state_load()

    def check_algorithm_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless `load_algorithm_state_dict` takes `state` here; change nothing, and send nothing.

        Call it where other things are loaded before the algorithm's state.
        """
        check_fields(state, name=object, round=int, plan=Mapping, algorithm=Mapping)
        if state["name"] != type(self.algorithm).__name__:
            raise ConfigError(
                f"this state was saved by {state['name']}, and {type(self.algorithm).__name__} is running. Wrap the "
                "model with the algorithm that was saved, or leave its state out."
            )
        at_least(0, round=state["round"])
        self._driver.planner.check_state(state["plan"])
        self._driver.trained.check_state(state.get("trained"), state["plan"])
        if "moments" in state:
            check_fields(state["moments"], "'moments' in this state", may_differ=bool, pending=bool)
        self.algorithm.check_state(state["algorithm"])

    def remember_optimizer(self, optimizer: Optimizer) -> None:
        """Tell of an optimizer before its first step, when its state has been loaded. Collective.

        Moments are then averaged whenever that is due. Otherwise, if a rank skips its first step, or the algorithm is
        changed before it, they are averaged at the next step of all ranks. `Checkpointer` calls it by itself.
        """
        self._driver.remember(optimizer)

    def consensus_distance(self) -> float:
        """How far the replicas are apart (root mean square distance to their mean); collective, equal on all ranks."""
        self._driver.settling.before_collective()
        return consensus.consensus_distance(self._replica, self.algorithm.weight_in_mean)

    def average_parameters(self) -> AbstractContextManager[None]:
        """Inside it the module holds the mean of all replicas; afterwards each has its own weights back. Collective."""
        self._driver.settling.before_collective()
        return consensus.average_parameters(self._replica, self.algorithm.weight_in_mean)

    def observe(self, observer: Observer | None) -> None:
        """Report to `observer` from now on, None ends it; an `Observer` calls it by itself."""
        self._driver.observe(observer)

    # Life

    def close(self) -> None:
        """Do the exchanges that a skipped step left undone, remove the hooks and end the communication; idempotent.

        Gradients stay usable. Training through the wrapper is refused from then on. On a GPU it raises what has failed
        since the last call.
        """
        self._driver.close()
        self._driver.settling.raise_unheard()

    def into_inner(self) -> nn.Module:
        """Close the wrapper and return the module, free of its hooks."""
        self.close()
        return self.module


def _given_or_default(algorithm: Algorithm | str | None, transport: Any = None) -> Algorithm:
    if algorithm is not None:
        return as_algorithm(algorithm)
    return as_algorithm(getattr(transport, "default_algorithm", None) or setting_from_env("algorithm") or PLAIN)
