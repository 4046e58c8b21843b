"""Long exchanges go in pieces, and nobody can tell from the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing

import pytest
import torch
from torch import Tensor

from contracts.training import by_step, perceptron, regression, train_world
from ddp.models import values
from murmura import (
    ByteGradAlgorithm,
    Cast,
    Compressor,
    ErrorFeedback,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    TracedTransport,
    Transport,
    run_world,
)
from murmura.algorithms import chunked_mean, gradient_allreduce, low_precision_decentralized
from murmura.algorithms.chunked_mean import ChunkedMean
from murmura.algorithms.codec_thread import CodecThread, cut
from worlds import SECONDS

CPU = torch.device("cpu")
MINMAX = MinMaxUInt8(block_size=4)


@pytest.mark.parametrize("compressor", [MINMAX, Cast(torch.bfloat16)], ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 15, 16, 17, 100])
def test_pieces_decode_to_the_bits_of_the_whole_in_as_many_bytes(compressor: Compressor, numel: int) -> None:
    flat = values(numel, seed=numel)
    bounds = cut(numel, 10, compressor, CPU)
    assert [bounds[0][0], *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), numel]
    assert len(bounds) == max(1, numel // (8 if compressor is MINMAX else 10))
    decoded = [there_and_back(compressor, flat[start:stop]) for start, stop in bounds]
    assert torch.equal(torch.cat(decoded), there_and_back(compressor, flat))
    sizes = [compressor.payload_bytes(stop - start, flat.dtype) for start, stop in bounds]
    assert sum(sizes) == compressor.payload_bytes(numel, flat.dtype)


def there_and_back(compressor: Compressor, flat: Tensor) -> Tensor:
    payload = torch.empty(compressor.payload_bytes(flat.numel(), flat.dtype), dtype=torch.uint8)
    compressor.compress(flat, payload)
    out = torch.empty_like(flat)
    compressor.decompress(payload, out)
    return out


@pytest.mark.parametrize("compressor", [MinMaxUInt8(block_size=None), ErrorFeedback(MINMAX)], ids=repr)
def test_what_looks_at_the_whole_is_not_cut(compressor: Compressor) -> None:
    assert cut(1000, 10, compressor, CPU) == [(0, 1000)]


def test_a_gpu_takes_all_at_once() -> None:
    assert cut(1000, 10, MINMAX, torch.device("cuda")) == [(0, 1000)]


def mean_of(
    transport: Transport, numel: int, compressor: Compressor, shares: Sequence[int] | None
) -> tuple[Tensor, list[int]]:
    """The mean and, by message, what this rank sent for it."""
    traced = TracedTransport(transport)
    flat = values(numel, seed=transport.rank)
    with closing(CodecThread()) as codec:
        ChunkedMean(traced, flat, compressor, codec, shares=shares)(flat)
    return flat, [each.sent_bytes for each in traced.operations]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("numel", [0, 3, 31, 95, 96, 97, 1001])
def test_a_mean_in_pieces_has_the_same_bits_and_bytes(monkeypatch: pytest.MonkeyPatch, size: int, numel: int) -> None:
    for compressor, shares in ((MINMAX, None), (MINMAX, range(1, size + 1)), (Cast(torch.bfloat16), None)):
        whole = run_world(mean_of, size, numel, compressor, shares, timeout=SECONDS)
        with monkeypatch.context() as patch:
            patch.setattr(chunked_mean, "PIECE_ELEMENTS", 8)
            cut_up = run_world(mean_of, size, numel, compressor, shares, timeout=SECONDS)
        for (mean, sent), (other, other_sent) in zip(whole, cut_up, strict=True):
            assert torch.equal(mean, other)
            assert sum(sent) == sum(other_sent)
            assert len(other_sent) == len(sent) * max(1, numel // size // 8)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("algorithm", [LowPrecisionDecentralizedAlgorithm, ByteGradAlgorithm])
def test_training_in_pieces_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, size: int, algorithm: type) -> None:
    cuts: list[int] = []

    class Counting(CodecThread):
        def start(self, work: Callable[[], None], *, num_pieces: int) -> Future[None]:
            cuts.append(num_pieces)
            return super().start(work, num_pieces=num_pieces)

    def train() -> list[list[Tensor]]:
        chosen = algorithm(hierarchical=False, compressor=MinMaxUInt8(block_size=16))
        return by_step(train_world(size, chosen, regression("momentum"), 3))

    whole = train()
    for module in (low_precision_decentralized, chunked_mean):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 32)
    for module in (low_precision_decentralized, gradient_allreduce):
        monkeypatch.setattr(module, "CodecThread", Counting)
    in_pieces = train()
    numel = sum(each.numel() for each in perceptron().parameters())
    assert set(cuts) == {(numel if algorithm is LowPrecisionDecentralizedAlgorithm else numel // size) // 32}
    for flats, others in zip(whole, in_pieces, strict=True):
        assert all(torch.equal(flat, other) for flat, other in zip(flats, others, strict=True))


def test_work_beside_an_exchange_is_done_in_order_and_its_error_is_told() -> None:
    done: list[int] = []
    with closing(CodecThread()) as codec:
        futures = [codec.start(lambda number=number: done.append(number), num_pieces=2) for number in range(5)]  # type: ignore[misc]
        futures[-1].result(SECONDS)
        assert done == [0, 1, 2, 3, 4]

        def fail() -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            codec.start(fail, num_pieces=2).result(SECONDS)
