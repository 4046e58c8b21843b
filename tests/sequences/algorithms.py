"""The algorithms of the scripts, as the library makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

import murmura
from murmura import Algorithm, Compressor, ErrorFeedback, MinMaxUInt8, Neighbours
from murmura.algorithms import topology_named
from murmura.algorithms.base import AlgorithmImpl
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from murmura.algorithms.topology import Topology
from murmura.buckets import Bucket
from sequences.actions import LEARNING_RATE, Choice, Script

Layout = tuple[str, ...]


def inner_of(name: str) -> Compressor:
    """The compressor inside the error feedback; the simulation shares it."""
    match name:
        case "topk" | "qadam_topk":
            return murmura.TopK(0.25)
        case "randomk":
            return murmura.RandomK(0.4)
        case "sign" | "qadam_sign":
            return murmura.Sign(8)
        case "uint4" | "streaming_uint4":
            return murmura.MinMaxUInt4(8)
        case "majority_vote":
            return murmura.Sign(scaled=False)
        case "sparse_loco":
            return murmura.TopKTwoBit(64, 16)
    raise AssertionError(name)


def lopsided(rank: int, size: int, number: int) -> Neighbours:
    """To the next rank: half of what a rank holds, but a quarter of what rank 0 does."""
    if size == 1:
        return Neighbours([], [], [1.0])
    former, share = (rank - 1) % size, 0.75 if rank == 0 else 0.5
    return Neighbours([(rank + 1) % size], [former], [share, 0.25 if former == 0 else 0.5])


def topology_of(choice: Choice) -> Topology:
    """Of push_sum another one for each interval, which it does not have."""
    if choice.name != "push_sum":
        return topology_named(choice.name)
    names = {2: "random_matching:seed=7", 3: "one_peer_exponential"}
    return topology_named(names[choice.interval]) if choice.interval in names else lopsided


def options_of(choice: Choice) -> dict[str, Any]:
    """Of powersgd others for each interval, which it does not have."""
    return {1: {}, 2: {"warm_start": False}, 3: {"warmup_rounds": 2}}[choice.interval]


class WatchedImpl(GradientAllReduceAlgorithmImpl):
    layouts: list[Layout]

    def on_bucket_ready(self, bucket: Bucket) -> None:
        self.layouts.append(tuple(bucket.names))
        super().on_bucket_ready(bucket)


@dataclass(frozen=True)
class Watched(murmura.GradientAllReduceAlgorithm):
    """Tells in which order gradients travel: what a block of elements loses depends on it."""

    impl: ClassVar[type[AlgorithmImpl]] = WatchedImpl

    layouts: list[Layout] = field(default_factory=list, kw_only=True, repr=False, compare=False)


def algorithm_of(choice: Choice, layouts: list[Layout]) -> Algorithm:
    """The algorithm of `choice`; if its messages depend on the order of gradients, it adds that to `layouts`."""
    if choice.then is not None:
        first = algorithm_of(replace(choice, then=None), layouts)
        return murmura.Phased(first, choice.until, then=algorithm_of(choice.then, layouts))
    match choice.name:
        case "gradient_allreduce":
            return murmura.GradientAllReduceAlgorithm()
        case "bytegrad":  # blocks of one element lose nothing, so that it does not matter how buckets are cut
            return murmura.ByteGradAlgorithm(compressor=MinMaxUInt8(block_size=1))
        case "topk" | "randomk" | "sign" | "uint4":
            return Watched(compressor=ErrorFeedback(inner_of(choice.name)), layouts=layouts)
        case "majority_vote":
            return Watched(compressor=inner_of(choice.name), layouts=layouts)
        case "powersgd":
            return murmura.PowerSGDAlgorithm(1, min_compression_rate=1.0, **options_of(choice))
        case "decentralized":
            return murmura.DecentralizedAlgorithm(communication_interval=choice.interval)
        case "shift_one":
            return murmura.DecentralizedAlgorithm(
                peer_selection_mode="shift_one", communication_interval=choice.interval
            )
        case "low_precision_decentralized":
            return murmura.LowPrecisionDecentralizedAlgorithm(communication_interval=choice.interval)
        case "qadam":
            return murmura.QAdamAlgorithm()
        case "qadam_sign" | "qadam_topk":
            return murmura.QAdamAlgorithm(compressor=ErrorFeedback(inner_of(choice.name)))
        case "async":
            return murmura.AsyncModelAverageAlgorithm(sync_interval_rounds=choice.interval, warmup_rounds=choice.warmup)
        case "push_sum":
            return murmura.PushSumAlgorithm(topology_of(choice))
        case "exponential" | "random_matching":
            return murmura.DecentralizedAlgorithm(topology=topology_of(choice), communication_interval=choice.interval)
        case "local_sgd":
            return murmura.LocalSGDAlgorithm(choice.interval)
        case "average_moments":
            return murmura.LocalSGDAlgorithm(choice.interval, average_moments=True)
        case "diloco":
            return murmura.DiLoCoAlgorithm(choice.interval)
        case "streaming_diloco" | "streaming_uint4":
            fragments = min(2, choice.interval)
            compressor = ErrorFeedback(inner_of(choice.name)) if choice.name == "streaming_uint4" else None
            return murmura.StreamingDiLoCoAlgorithm(
                choice.interval, fragments=fragments, overlap=1, compressor=compressor
            )
        case "sparse_loco":
            compressor = ErrorFeedback(inner_of(choice.name), decay=0.95)
            return murmura.DiLoCoAlgorithm(choice.interval, 1.0, 0.0, compressor=compressor)
    raise AssertionError(choice)


def optimizer_of(script: Script, parameters: Iterable[nn.Parameter]) -> Optimizer:
    match script.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr=LEARNING_RATE)
        case "momentum":
            return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, weight_decay=0.01)
        case "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        case "qadam":
            return murmura.QAdamOptimizer(parameters, lr=0.01, warmup_steps=script.warmup)
    raise AssertionError(script.optimizer)
