"""Which gradients share a bucket, and when that changes: the same plan on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from murmura.algorithms.checks import NOT_SAVED, check_fields
from murmura.buckets import Bucket, ParameterSpec, bucket_limit, plan_buckets
from murmura.buckets.flat import Allocate
from murmura.ddp.replica import ModelReplica
from murmura.errors import ConfigError


class BucketPlanner:
    """Cuts the parameters of `replica` into buckets, in the order in which their gradients are expected.

    That is the reverse of their definition until the first round has shown another.
    """

    def __init__(self, replica: ModelReplica, bucket_bytes: Sequence[int]) -> None:
        self._replica = replica
        self._bucket_bytes = bucket_bytes
        self.allocate: Allocate = replica.transport.allocate  # the memory of the buckets
        self._order = list(reversed(replica.trainable()))
        self.is_observed = False  # the order in which gradients come is known
        self._cut: list[tuple[int, ...]] | None = None  # the order cut into buckets, once asked for

    @property
    def order(self) -> Sequence[int]:
        """The indices of the parameters that have a place in a bucket."""
        return self._order

    def buckets(self) -> list[Bucket]:
        """New buckets."""
        replica = self._replica
        return [
            Bucket(
                index,
                [replica.names[each] for each in members],
                [replica.parameters[each] for each in members],
                self.allocate,
            )
            for index, members in enumerate(self._plan())
        ]

    def _plan(self) -> list[tuple[int, ...]]:
        """The indices of the parameters in each bucket."""
        if self._cut is None:
            replica = self._replica
            specs = [
                ParameterSpec(name, p.numel(), p.dtype, p.device)
                for name, p in zip(replica.names, replica.parameters, strict=True)
            ]
            # A launch on a GPU costs the same for any size and NCCL is faster the larger it is: as torch's DDP does it.
            # The transport decides, not the parameters, for all ranks must plan alike.
            fills = replica.transport.gpu is not None
            limits: int | Sequence[int] = self._bucket_bytes
            if len(self._bucket_bytes) == 1:
                limits = self._bucket_bytes[0]
                if not fills:
                    num_hosts = len(set(replica.transport.hosts))
                    limits = bucket_limit([specs[each] for each in self._order], limits, num_hosts)
            self._cut = plan_buckets(specs, self._order, limits, fills=fills)
        return self._cut

    def add(self, indices: Sequence[int]) -> bool:
        """Give further parameters a place; whether they had none."""
        before, self._order = self._order, [*self._order, *sorted(set(indices) - set(self._order), reverse=True)]
        self._cut = self._cut if len(before) == len(self._order) else None
        return len(before) < len(self._order)

    def observe(self, observed: Sequence[nn.Parameter]) -> bool:
        """Take over, once, the order in which rank 0 observed gradients; whether it is another one. Collective."""
        if self.is_observed:
            return False
        self.is_observed = True
        position = {id(parameter): index for index, parameter in enumerate(self._replica.parameters)}
        came = [position[id(parameter)] for parameter in observed]
        order = torch.tensor([*came, *(index for index in self._order if index not in set(came))])
        self._replica.transport.broadcast(order, 0)
        before, self._order = self._order, order.tolist()
        if before == self._order:
            return False
        self._cut = None
        return True

    def state_dict(self) -> dict[str, Any]:
        """What another run needs to cut the same buckets."""
        names = self._replica.names
        return {
            "buckets": [[names[each] for each in members] for members in self._plan()],
            "is_observed": self.is_observed,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless `state` cuts buckets of this model."""
        check_fields(state, "'plan' in this state", buckets=list, is_observed=bool)
        if not all(isinstance(bucket, list | tuple) and bucket for bucket in state["buckets"]):
            raise ConfigError(f"'buckets' in this state is {state['buckets']!r}, no lists of names. {NOT_SAVED}")
        names = [name for bucket in state["buckets"] for name in bucket]
        unknown = [name for name in names if name not in self._replica.names]
        if unknown:
            raise ConfigError(
                f"this state holds parameter {unknown[0]!r}, which the model here does not have: it was saved for "
                "another model."
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"'buckets' in this state holds a parameter twice: {state['buckets']!r}. {NOT_SAVED}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Cut the buckets as the run did that this one resumes: what was frozen then has no place yet."""
        place = {name: index for index, name in enumerate(self._replica.names)}
        self.is_observed = state["is_observed"]
        self._cut = [tuple(place[name] for name in bucket) for bucket in state["buckets"]]
        self._order = [index for bucket in self._cut for index in bucket]
