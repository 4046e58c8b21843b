"""Gradient algorithms as communication hooks on torch's DistributedDataParallel, which stays as it is.

torch cuts the buckets, finds unused parameters and decides what synchronises; murmura exchanges each full bucket on
the transport that `DDP` would take for the same process group. Algorithms that exchange weights or momenta need
`murmura.DDP`, and are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from murmura.algorithms import Algorithm, AlgorithmImpl, GradientAllReduceAlgorithmImpl
from murmura.algorithms.background_exchange import BackgroundExchanges
from murmura.algorithms.checks import check_fields
from murmura.algorithms.names import as_algorithm
from murmura.buckets import Bucket
from murmura.ddp.replica import ModelReplica
from murmura.ddp.replica_checks import check_same_algorithm
from murmura.errors import ConfigError, MurmuraError, UsageError
from murmura.transports.connect import transport_for
from murmura.types import Exchanges

__all__ = ["AppliedAlgorithm", "apply"]

# Moments of a round that a communication hook does not see.
_UNSEEN = (
    "before_round",
    "before_forward",
    "before_backward",
    "parameters_unused",
    "after_backward",
    "skip_step",
    "before_step",
    "after_step",
    "after_steps",
    "settle",
    "before_collective",
)


def apply(ddp_model: DistributedDataParallel, algorithm: Algorithm | str) -> AppliedAlgorithm:
    """Let `algorithm` exchange the gradients of a model that torch's DistributedDataParallel wraps. Collective.

    Every rank calls it once, before the first backward. `algorithm` is one that averages gradients, such as
    ``GradientAllReduceAlgorithm(compressor=Cast(torch.bfloat16))`` or ``"bytegrad"``, or its name.

    Returns what holds the algorithm's state for checkpoints, and is closed before the process group is destroyed.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise UsageError(
            f"apply() takes a model wrapped by torch's DistributedDataParallel, and this is a "
            f"{type(ddp_model).__name__}. Wrap it, or give the bare model to murmura.DDP(model, algorithm=...)."
        )
    chosen = as_algorithm(algorithm)
    refuse_what_hooks_cannot_do(chosen)
    return AppliedAlgorithm(ddp_model, chosen)


def refuse_what_hooks_cannot_do(algorithm: Algorithm) -> None:
    """Raise `UsageError` unless `algorithm` does nothing but average each bucket of gradients."""
    impl = algorithm.impl
    if impl is None or impl.exchanges is not Exchanges.GRADIENTS or _unseen_moments(impl):
        raise UsageError(
            f"{algorithm} does more than average gradients during backward, and torch's communication hooks see "
            "nothing else. Wrap the bare model instead: murmura.DDP(model, algorithm=...) runs every algorithm; on "
            "torch's class 'gradient_allreduce' and 'bytegrad' run, with any compressor."
        )
    if not getattr(algorithm, "average", True):
        raise UsageError(
            f"{algorithm} sums gradients, and torch's class would sum the same ones again if it synchronises a second "
            "time before the step. Leave average=False out and multiply the loss by the number of ranks."
        )


def _unseen_moments(impl: type[AlgorithmImpl]) -> list[str]:
    known = (AlgorithmImpl, GradientAllReduceAlgorithmImpl)  # the latter's guard average=False, which is refused
    return [name for name in _UNSEEN if all(getattr(impl, name) is not getattr(each, name, None) for each in known)]


class AppliedAlgorithm:
    """An algorithm that exchanges the gradients of one model of torch's DistributedDataParallel; see `apply`."""

    def __init__(self, ddp_model: DistributedDataParallel, algorithm: Algorithm) -> None:
        module: nn.Module = ddp_model.module
        ignored = set(ddp_model.parameters_to_ignore)
        self._transport = transport_for(module, process_group=ddp_model.process_group)
        try:
            channel = self._transport.channel("torch ddp").without_listeners()
            check_same_algorithm(channel, algorithm)
            self._replica = ModelReplica(module, channel, ignored)
            self._names = {id(parameter): name for name, parameter in module.named_parameters()}
            self._background = BackgroundExchanges(channel)
            self._algorithm = algorithm.reify(channel)
            self._algorithm.setup(self._replica)
            self._is_alone = channel.world_size == 1 and not self._algorithm.works_alone
            self._failure: BaseException | None = None
            self._waiting: list[tuple[Bucket, Any]] = []  # with their futures, until all new buckets are known
            self._new: list[Bucket] = []  # the buckets of this round, in another cut than those of the last
            self._is_known = False  # whether all buckets of a round have been seen, or their cut was loaded

            def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, but not from strings
                return self.exchange(bucket)

            # torch keeps the hook, and with it this object, as long as its wrapper: so this must not keep the wrapper.
            ddp_model.register_comm_hook(None, hook)
        except BaseException:
            self._transport.close()
            raise
        self._closer = weakref.finalize(ddp_model, self._transport.close)

    @property
    def algorithm(self) -> AlgorithmImpl:
        """The running algorithm."""
        return self._algorithm

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's state on this rank, such as compression residuals, for a checkpoint of every rank."""
        cut = [bucket.names for bucket in self._replica.buckets]
        return {"name": type(self._algorithm).__name__, "cut": cut, "algorithm": self._algorithm.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank; every rank calls it, before its first backward."""
        check_fields(state, name=object, cut=list, algorithm=Mapping)
        here = type(self._algorithm).__name__
        if state["name"] != here:
            raise ConfigError(f"this state was saved by {state['name']}, and {here} is running. Apply the same one.")
        self._algorithm.check_state(state["algorithm"])
        parameters = dict(zip(self._replica.names, self._replica.parameters, strict=True))
        self._replica.buckets = [
            Bucket(index, names, [parameters[name] for name in names], _empty)
            for index, names in enumerate(state["cut"])
        ]
        self._is_known = bool(self._replica.buckets)
        self._algorithm.load_state_dict(state["algorithm"])

    def close(self) -> None:
        """End the communication; idempotent. A backward that synchronises is refused from then on."""
        self._algorithm.close()
        self._closer()

    # In the thread of the backward

    def exchange(self, torch_bucket: Any) -> Any:
        """Start the exchange of a bucket and return the future of its mean."""
        if self._failure is not None:  # to the peers a later exchange would look like the one that failed
            raise self._failure
        buffer: Tensor = torch_bucket.buffer()
        devices: Any = [buffer.device] if buffer.is_cuda else None
        ended: Any = torch.futures.Future(devices=devices)
        if self._is_alone:
            ended.set_result(buffer)
            return ended
        bucket, is_last = self._as_bucket(torch_bucket), torch_bucket.is_last()
        buckets = self._replica.buckets
        is_cut_anew = bool(self._new) or (self._is_known and not _same(bucket, buckets, is_last))
        if is_cut_anew:
            self._new = self._new or buckets[: bucket.index]
            self._new.append(bucket)
            self._waiting.append((bucket, ended))
            if is_last:
                self._start_anew()
        else:
            buckets[bucket.index : bucket.index + 1] = [bucket]
            self._start(bucket, ended)
        if is_last:
            self._is_known = True
            self._replica.round += 1
        return ended.then(partial(self._result, buffer))

    def _start(self, bucket: Bucket, ended: Any) -> None:
        """Exchange `bucket` in the background, and complete the future `ended` where that runs."""
        what = f"bucket {bucket.index} (first parameter {bucket.names[0]!r}) of round {self._replica.round}"

        def work() -> None:
            try:
                if self._failure is None:
                    self._algorithm.on_bucket_ready(bucket)
            except BaseException as error:  # raised by the future, in the thread of the backward
                if isinstance(error, MurmuraError):
                    error.add_note(f"It was the exchange of {what}.")
                self._failure = error
            finally:
                ended.set_result(bucket.flat)  # with the tensor, or the future would not know which stream to follow

        self._background.start(what, [bucket.flat], work, "all_reduce")

    def _start_anew(self) -> None:
        """Exchange the buckets that have waited, after compression residuals have moved to the new buckets."""
        new, waiting = self._new, self._waiting
        self._new, self._waiting = [], []
        move = partial(self._algorithm.before_replan, new)
        pending = self._background.start("the cut into buckets", [bucket.flat for bucket in new], move, "all_gather")
        pending.wait()
        self._replica.buckets = new
        for bucket, ended in waiting:
            self._start(bucket, ended)

    def _result(self, buffer: Tensor, ended: Any) -> Tensor:
        if self._failure is not None:
            raise self._failure
        return buffer

    def _as_bucket(self, torch_bucket: Any) -> Bucket:
        parameters, buffer, index = torch_bucket.parameters(), torch_bucket.buffer(), torch_bucket.index()
        names = [self._names[id(parameter)] for parameter in parameters]
        return Bucket(index, names, parameters, lambda *_: buffer)


def _same(bucket: Bucket, buckets: Sequence[Bucket], is_last: bool) -> bool:
    """Whether `bucket` holds the same parameters as the one of its index in `buckets`."""
    at = bucket.index
    return at < len(buckets) and buckets[at].names == bucket.names and is_last == (at == len(buckets) - 1)


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)
