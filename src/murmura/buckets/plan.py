"""Which parameters share a bucket: a pure function, so that every rank comes to the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is smaller than the others, so that communication starts early."""


MIN_BUCKETS = 8
"""A model of some size is cut into about as many, so that there is something to overlap with backward."""

MIN_BUCKETS_BETWEEN_HOSTS = 4
"""There a message costs more: 0.3 ms of processor time for a peer, on the two cores of the benchmarks."""


class ParameterSpec(NamedTuple):
    """What the plan needs to know of a parameter."""

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def bucket_limit(specs: Sequence[ParameterSpec], bucket_bytes: int, num_hosts: int = 1) -> int:
    """The size of a bucket: `bucket_bytes`, or less for a model that would fit into a few of these."""
    total = sum(spec.num_bytes for spec in specs)
    min_buckets = MIN_BUCKETS if num_hosts == 1 else MIN_BUCKETS_BETWEEN_HOSTS
    return min(bucket_bytes, max(FIRST_BUCKET_BYTES, total // min_buckets))


def plan_buckets(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    bucket_bytes: int | Sequence[int],
    first_bytes: int = FIRST_BUCKET_BYTES,
    *,
    fills: bool = False,
) -> list[tuple[int, ...]]:
    """Cut the parameters, taken in `order`, into buckets; each is a tuple of indices into `specs`.

    A bucket has one dtype and one device and at most `bucket_bytes`, the first one at most `first_bytes`; a parameter
    larger than that is alone. A sequence has the limits of the first buckets and, last, of all others. If `fills`, a
    bucket has at least as much instead, with the parameter that brings it there. Buckets come in the order in which, if
    gradients come in `order`, they are complete.
    """
    closed: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    limits = [min(first_bytes, bucket_bytes), bucket_bytes] if isinstance(bucket_bytes, int) else bucket_bytes
    for index in order:
        spec = specs[index]
        kind = (spec.dtype, spec.device)
        bucket = open_buckets.setdefault(kind, [])
        limit = limits[min(len(closed), len(limits) - 1)]
        size = sum(specs[each].num_bytes for each in bucket) + spec.num_bytes
        if fills:
            bucket.append(index)
        if bucket and (size >= limit if fills else size > limit):
            closed.append(bucket)
            bucket = open_buckets[kind] = []
        if not fills:
            bucket.append(index)
    closed += (bucket for bucket in open_buckets.values() if bucket)
    position = {index: at for at, index in enumerate(order)}
    return [tuple(bucket) for bucket in sorted(closed, key=lambda bucket: position[bucket[-1]])]
