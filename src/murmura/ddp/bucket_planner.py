"""Which gradients share a bucket, and when that changes: the same plan on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from murmura.buckets import Bucket, ParameterSpec, bucket_limit, plan_buckets
from murmura.ddp.replica import ModelReplica
from murmura.errors import ConfigError


class BucketPlanner:
    """Cuts the parameters of `replica` into buckets, in the order in which their gradients are expected.

    That is the reverse of their definition until the first round has shown another.
    """

    def __init__(self, replica: ModelReplica, bucket_bytes: int) -> None:
        self._replica = replica
        self._bucket_bytes = bucket_bytes
        self._order = list(reversed(replica.trainable()))
        self._is_observed = False

    @property
    def order(self) -> Sequence[int]:
        """The indices of the parameters that have a place in a bucket."""
        return self._order

    def buckets(self) -> list[Bucket]:
        """New buckets."""
        replica = self._replica
        specs = [
            ParameterSpec(name, p.numel(), p.dtype, p.device)
            for name, p in zip(replica.names, replica.parameters, strict=True)
        ]
        limit = bucket_limit([specs[each] for each in self._order], self._bucket_bytes)
        return [
            Bucket(
                index,
                [replica.names[each] for each in members],
                [replica.parameters[each] for each in members],
                replica.transport.allocate,
            )
            for index, members in enumerate(plan_buckets(specs, self._order, limit))
        ]

    def add(self, indices: Sequence[int]) -> bool:
        """Give further parameters a place; whether they had none."""
        before, self._order = self._order, [*self._order, *sorted(set(indices) - set(self._order), reverse=True)]
        return len(before) < len(self._order)

    def observe(self, observed: Sequence[nn.Parameter]) -> bool:
        """Take over, once, the order in which rank 0 observed gradients; whether it is another one. Collective."""
        if self._is_observed:
            return False
        self._is_observed = True
        position = {id(parameter): index for index, parameter in enumerate(self._replica.parameters)}
        came = [position[id(parameter)] for parameter in observed]
        order = torch.tensor([*came, *(index for index in self._order if index not in set(came))])
        self._replica.transport.broadcast(order, 0)
        before, self._order = self._order, order.tolist()
        return before != self._order

    def state_dict(self) -> dict[str, Any]:
        """What another run needs to cut the same buckets."""
        return {"order": [self._replica.names[index] for index in self._order], "is_observed": self._is_observed}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Cut the buckets as the run did that this one resumes; whether that changes the order."""
        place = {name: index for index, name in enumerate(self._replica.names)}
        order = [place.get(name, -1) for name in state["order"]]
        if sorted(order) != sorted(self._order):
            raise ConfigError(
                "this state was saved with other parameters trainable than are here. Freeze the same ones before "
                "you load it."
            )
        self._is_observed = state["is_observed"]
        before, self._order = self._order, order
        return before != order
