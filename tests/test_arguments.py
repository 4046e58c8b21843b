"""Arguments that make no sense are refused where they are given, by murmura's own errors that name them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from murmura import (
    DDP,
    AllReduceAggregator,
    ConfigError,
    DistributedConfig,
    FaultyTransport,
    InProcessTransport,
    MinMaxUInt8,
    ParameterServer,
    ProcessGroupTransport,
    Sign,
    ThrottledTransport,
    TracedTransport,
    UsageError,
    average_losses,
    connect,
    register_algorithm,
    register_compressor,
    register_topology,
    seed_everything,
)
from murmura.algorithms import algorithm_named, algorithm_names
from murmura.algorithms.toolkit import (
    BackgroundExchanges,
    CodecThread,
    CompressedMean,
    FlatWeights,
    Hierarchy,
    ParameterState,
    as_real,
    compressed_mean,
    gradients_are_gone,
    mean_bytes,
    num_elements,
)
from murmura.buckets import Bucket
from murmura.buckets.flat import FlatTensors, plain_memory

NO_NUMBERS = (None, "x", [1], math.nan, math.inf)
NO_OBJECTS = (*NO_NUMBERS, -1, 0, True)


def alone() -> InProcessTransport:
    return InProcessTransport.create_group(1)[0]


PLACE = DistributedConfig(world_size=1, rank=0)

CALLS: dict[str, tuple[str, tuple[Any, ...], Callable[[Any], Any]]] = {
    "register_algorithm": ("name", NO_OBJECTS[:1] + NO_OBJECTS[2:], register_algorithm),
    "register_compressor": ("name", NO_OBJECTS[:1] + NO_OBJECTS[2:], register_compressor),
    "register_topology": ("name", NO_OBJECTS[:1] + NO_OBJECTS[2:], register_topology),
    "feedback": ("feedback", NO_OBJECTS[:-1], lambda value: register_compressor("refused", feedback=value)),
    "what an algorithm's name stands for": ("refused", NO_OBJECTS, lambda value: register_algorithm("refused")(value)),
    "what a compressor's name stands for": ("refused", NO_OBJECTS, lambda value: register_compressor("refused")(value)),
    "seed": ("seed", NO_NUMBERS, lambda value: seed_everything(value, 0)),
    "rank": ("rank", NO_NUMBERS, lambda value: seed_everything(0, value)),
    "transport of a mean loss": ("transport", NO_OBJECTS, lambda value: average_losses(value, 1.0, 1)),
    "loss": ("loss", (None, "x", [1]), lambda value: average_losses(alone(), value, 1)),
    "traced transport": ("transport", NO_OBJECTS, TracedTransport),
    "slow transport": ("transport", NO_OBJECTS, ThrottledTransport),
    "faulty transport": (
        "transport", NO_OBJECTS, lambda value: FaultyTransport(value, "hang", rank=0, operation="barrier"),
    ),
    "rank that fails": (
        "rank", NO_NUMBERS, lambda value: FaultyTransport(alone(), "hang", rank=value, operation="barrier"),
    ),
    "operation that fails": (
        "operation", NO_OBJECTS, lambda value: FaultyTransport(alone(), "hang", rank=0, operation=value),
    ),
    "latency": ("latency", (*NO_NUMBERS, -1, True), lambda value: ThrottledTransport(alone(), latency=value)),
    "process group": ("process_group", NO_OBJECTS, ProcessGroupTransport),
    "config of a connection": ("config", NO_OBJECTS[1:], connect),
    "config of an aggregator": ("config", NO_OBJECTS, lambda value: AllReduceAggregator(value, alone())),
    "transport of an aggregator": ("transport", NO_OBJECTS, lambda value: ParameterServer(PLACE, value)),
    "ignore": ("ignore", NO_OBJECTS, lambda value: DDP(nn.Linear(2, 2), alone(), ignore=value)),
    "sizes of buckets": (
        "bucket_cap_mb_list", ("x", *NO_OBJECTS[3:-2], True, [None], [math.nan]),
        lambda value: DDP(nn.Linear(2, 2), alone(), bucket_cap_mb_list=value),
    ),
}  # fmt: skip


# The toolkit of those who write algorithms


FLAT = torch.ones(8)


def mean(**options: Any) -> CompressedMean:
    given = {"transport": alone(), "like": FLAT, "compressor": "uint8", "codec": CodecThread(), **options}
    return compressed_mean(**given)


class Answering(Sign):
    """A compressor of a user's, whose method `which` returns `answer`."""

    def __init__(self, which: str, answer: Any) -> None:
        super().__init__()
        object.__setattr__(self, which, lambda *args: answer)


def bucket() -> Bucket:
    layer = nn.Linear(3, 2)
    return Bucket(0, ["weight", "bias"], [layer.weight, layer.bias], plain_memory)


def flat_of(state: Any) -> Any:
    kept = ParameterState()
    kept.set("weight", state)
    return kept.flat(bucket())


NO_FLATS = (*NO_OBJECTS, torch.ones(7), torch.ones(9), torch.ones(2, 4))

CALLS |= {
    "transport of a mean": ("transport", NO_OBJECTS, lambda value: mean(transport=value)),
    "tensor of a mean": ("like", NO_OBJECTS, lambda value: mean(like=value)),
    "compressor of a mean": ("compressor", (*NO_OBJECTS, MinMaxUInt8), lambda value: mean(compressor=value)),
    "length of a payload": (
        "payload_bytes", (*NO_NUMBERS, -1, True, 1.5), lambda value: mean(compressor=Answering("payload_bytes", value)),
    ),
    "compressor of a bucket": (
        "for_bucket", NO_OBJECTS, lambda value: mean(compressor=Answering("for_bucket", value)),
    ),
    "codec of a mean": ("codec", NO_OBJECTS, lambda value: mean(codec=value)),
    "shares": ("shares", (*NO_OBJECTS[3:], "x", [1, 1], [0], [math.nan]), lambda value: mean(shares=value)),
    "average": ("average", NO_OBJECTS[:-1], lambda value: mean(average=value)),
    "what is averaged": ("flat", (*NO_FLATS, FLAT.double()), lambda value: mean()(value)),
    "what is gathered": ("flat", (*NO_FLATS, FLAT.int()), lambda value: mean(compressor="topk")(value)),
    "transport of a hierarchy": ("transport", NO_OBJECTS, lambda value: Hierarchy(value, True)),
    "hierarchy by host": ("by_host", NO_OBJECTS[:-1], lambda value: Hierarchy(alone(), value)),
    "channel": ("channel", NO_OBJECTS, BackgroundExchanges),
    "work": ("work", NO_OBJECTS, lambda value: BackgroundExchanges(alone()).start("nothing", [], value)),
    "replica": ("replica", NO_OBJECTS, FlatWeights),
    "flats": ("flats", (*NO_OBJECTS, FLAT, [torch.ones(7)], [torch.ones(9)], []), FlatTensors([FLAT]).read),
    "parts of flats": ("flats", (*NO_OBJECTS, [torch.ones(9)]), FlatTensors([FLAT]).parts),
    "state of a parameter": ("weight", (*NO_OBJECTS, torch.ones(1), torch.ones(7)), flat_of),
    "state of a bucket": ("flat", NO_FLATS, lambda value: ParameterState().set_flat(bucket(), value)),
    "bucket of a state": ("bucket", NO_OBJECTS, lambda value: ParameterState().flat(value)),
    "bucket of a new state": ("bucket", NO_OBJECTS, lambda value: ParameterState().set_flat(value, FLAT)),
    "names to restore": ("names", (*NO_OBJECTS, "weight", ["weight", 1]), ParameterState().restore_those_of),
    "replica whose gradients may be gone": ("replica", NO_OBJECTS, gradients_are_gone),
    "complex values": ("flat", NO_OBJECTS, as_real),
    "tensors of an exchange": (
        "tensors", NO_OBJECTS, lambda value: BackgroundExchanges(alone()).start("nothing", value, FLAT.zero_),
    ),
    "work of a codec": ("work", NO_OBJECTS, lambda value: CodecThread().start(value, num_pieces=1)),
    "pieces of a codec": (
        "num_pieces", NO_OBJECTS[:-1], lambda value: CodecThread().start(FLAT.zero_, num_pieces=value),
    ),
    "parameters": ("parameters", (*NO_NUMBERS, -1, True, [[1, -2]], [[1.5]], [None]), num_elements),
    "number of ranks": ("num_ranks", (*NO_NUMBERS, -1, 0, True), lambda value: mean_bytes(8, value)),
}  # fmt: skip

for each in algorithm_names():
    CALLS |= {
        f"parameters of {each}": (
            "parameters", (*NO_NUMBERS, -1, True, [[1, -2]], [[1.5]], [None]),
            lambda value, each=each: algorithm_named(each).bytes_per_round(value, 2),
        ),
        f"number of ranks of {each}": (
            "num_ranks", (*NO_NUMBERS, -1, 0, True),
            lambda value, each=each: algorithm_named(each).bytes_per_round([[8, 8]], value),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_that_makes_no_sense_is_named(call: str) -> None:
    name, values, attempt = CALLS[call]
    for value in values:
        with pytest.raises((ConfigError, UsageError), match=name):
            attempt(value)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, set, iter, tuple])
def test_ranks_may_come_in_any_collection(kind: Callable[[list[int]], Any]) -> None:
    for group in (alone().subgroup(kind([0])), alone().split("some", kind([0]))):
        assert group is not None
        assert group.world_size == 1


def test_the_length_of_a_payload_may_be_numpy_s() -> None:
    mean(compressor=Answering("payload_bytes", np.int64(8)))
