"""All ranks run the same algorithm with the same options, and are told where they do not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddp.models import backward, errors_on, on_ranks, weight
from murmura import (
    DDP,
    Algorithm,
    Cast,
    Compressor,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    Phased,
    PushSumAlgorithm,
    ReplicaDivergence,
    TracedTransport,
    Transport,
)
from murmura.algorithms import algorithm_named
from murmura.algorithms.choices import choices_text
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from murmura.algorithms.topology import Neighbours, Ring
from murmura.types import ReduceOp


class Unseen:
    """An object whose repr holds its address."""

    def __init__(self, **public: Any) -> None:
        vars(self).update(public)


class Shift(Unseen):
    """A topology of one's own, without a repr."""

    def __call__(self, rank: int, size: int, number: int) -> Neighbours:
        return Ring()(rank, size, number)


class Half(Compressor):
    """A compressor of one's own, which is no dataclass."""

    def __init__(self, scale: float) -> None:
        self.scale, self.table = scale, torch.ones(2)

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        raise NotImplementedError

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        raise NotImplementedError


class OwnImpl(GradientAllReduceAlgorithmImpl):
    def on_bucket_ready(self, bucket: Any) -> None:
        self.process_group.all_reduce(bucket.flat, ReduceOp.MEAN)


@dataclass(frozen=True)
class Own(GradientAllReduceAlgorithm):
    """An algorithm of one's own with one more option, and one that each rank chooses for itself."""

    impl = OwnImpl

    option: Any = field(default=None, kw_only=True)
    path: str = field(default="", kw_only=True, compare=False)


def chosen(transport: Transport, *algorithms: Algorithm | str) -> Algorithm | str:
    """The last rank has the second of `algorithms`."""
    return algorithms[transport.rank == transport.world_size - 1]


DIFFERENT = [
    ("diloco:interval=4", "diloco:interval=4:outer_lr=0.1", "outer_lr=0.1"),
    ("powersgd", "powersgd:seed=1", "seed=1"),
    ("gradient_allreduce:compressor=sign", "gradient_allreduce:compressor=majority_vote", "scaled=False"),
    ("gradient_allreduce:compressor=randomk", "gradient_allreduce:compressor=randomk(seed=1)", "seed=1"),
    ("streaming_diloco:interval=4:fragments=2:overlap=2", "gradient_allreduce", "GradientAllReduceAlgorithm("),
    ("push_sum:topology=random_matching", "push_sum:topology=random_matching(seed=1)", "RandomMatching(seed=1)"),
    (
        Phased(GradientAllReduceAlgorithm(), 3, then=DiLoCoAlgorithm(4)),
        Phased(GradientAllReduceAlgorithm(), 3, then=DiLoCoAlgorithm(5)),
        "then=DiLoCoAlgorithm(interval=5",
    ),
]


@pytest.mark.parametrize(("one", "other", "words"), DIFFERENT, ids=lambda each: str(each)[:40])
def test_wrapping_with_another_algorithm_is_refused_and_shows_both(one: Any, other: Any, words: str) -> None:
    for error in errors_on(lambda transport: DDP(weight(), transport, algorithm=chosen(transport, one, other)), 3):
        assert isinstance(error, ReplicaDivergence)
        _, first, second, third, advice = str(error).split("\n")
        assert "the ranks run different algorithms" in str(error)
        assert first.removeprefix("  rank 0: ") == second.removeprefix("  rank 1: ")
        assert third.startswith("  rank 2: ")
        assert words in third
        assert words not in first
        assert "MURMURA_ALGORITHM" in advice


def test_changing_to_another_algorithm_is_refused_and_the_running_one_goes_on() -> None:
    def run(transport: Transport) -> tuple[str, float]:
        with closing(DDP(weight(), transport, algorithm="gradient_allreduce")) as ddp:
            with pytest.raises(ReplicaDivergence) as refusal:
                ddp.set_algorithm(chosen(transport, "diloco:interval=4", "diloco:interval=5"))
            backward(ddp, transport.rank)
            assert ddp.module.weight.grad is not None
            return str(refusal.value), ddp.module.weight.grad.item()

    for text, gradient in on_ranks(run, 3):
        assert "rank 1: DiLoCoAlgorithm(interval=4" in text
        assert "rank 2: DiLoCoAlgorithm(interval=5" in text
        assert gradient == 1.0


def test_the_comparison_at_the_start_costs_no_message_of_its_own() -> None:
    def run(transport: Transport) -> list[str]:
        traced = TracedTransport(transport)
        with closing(DDP(weight(), traced)):
            return [operation.name for operation in traced.operations]

    assert on_ranks(run, 2) == [["all_reduce", "broadcast"]] * 2


LEGAL: dict[str, Callable[[int], Any]] = {
    "lambda": lambda rank: [lambda: 0, lambda: 1][rank],
    "function": lambda rank: [print, chosen][rank],
    "object": lambda rank: Unseen(number=rank),
    "device": lambda rank: torch.device("cuda", rank),
    "tensor": torch.tensor,
    "topology": lambda rank: Shift(by=3, cache={rank}, _calls=rank),
    "compressor": lambda rank: Half(0.5),
    "inside": lambda rank: ErrorFeedback(Half(0.5)),
    "set": lambda rank: {"ab", "cd"} if rank else {"cd", "ab"},
    "order": lambda rank: {"a": 1, "b": 2} if rank else {"b": 2, "a": 1},
    "number": lambda rank: (1.0, 2) if rank else [1, np.int64(2)],
}


@pytest.mark.parametrize("make", LEGAL.values(), ids=list(LEGAL))
def test_what_may_differ_between_ranks_is_not_compared(make: Callable[[int], Any]) -> None:
    def run(transport: Transport) -> str:
        algorithm = Own(option=make(transport.rank), path=f"rank-{transport.rank}")
        with closing(DDP(weight(), transport, algorithm=algorithm)) as ddp:
            ddp.set_algorithm(algorithm)
            backward(ddp, 1)
        return choices_text(algorithm)

    one, other = on_ranks(run, 2)
    assert one == other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Shift(by=3), Shift(by=4)),
        (Half(0.5), Half(0.25)),
        (ErrorFeedback(Half(0.5)), ErrorFeedback(Half(0.25))),
        (Half(0.5), Cast(torch.float16)),
        (Cast(torch.bfloat16), Cast(torch.float16)),
        ({"a": 1}, {"a": 2}),
        (["a"], ["b"]),
        ({"a"}, {"b"}),
        (ReduceOp.SUM, ReduceOp.MEAN),
        (Half, Cast),
        (None, 0),
        (0.1, 0.1 + 2**-55),
        (b"a", b"b"),
        (Unseen(), print),
    ],
    ids=range(14),  # some have an address in their text, another one in each process
)
def test_other_choices_have_another_text(one: Any, other: Any) -> None:
    texts = [choices_text(Own(option=each)) for each in (one, other)]
    assert texts[0] != texts[1]
    assert not any(" at 0x" in text or "\n" in text for text in texts)


def test_a_text_reads_like_the_declaration() -> None:
    for name in ("diloco:compressor=uint4", "powersgd", "async", "bytegrad"):
        algorithm = algorithm_named(name)
        assert choices_text(algorithm).replace(".0", "") == repr(algorithm).replace(".0", "")
    assert choices_text(PushSumAlgorithm(topology=Shift(by=3))).endswith("topology=Shift(by=3))")
