"""Means of compressed values, in the way that the compressor declares."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.algorithms.chunked_mean import ChunkedMean
from murmura.algorithms.codec_thread import CodecThread
from murmura.algorithms.compressed import CompressedMean
from murmura.algorithms.gathered_mean import GatheredMean
from murmura.compressors import Compressor
from murmura.transports.base import Transport


def compressed_mean(
    transport: Transport,
    like: Tensor,
    compressor: Compressor,
    codec: CodecThread,
    *,
    shares: Sequence[int] | None = None,
    average: bool = True,
) -> CompressedMean:
    """What averages flat tensors like `like`, in the way that `compressor` declares.

    `codec` encodes and decodes beside the exchange where the compressor allows that. With ``average=False`` it is the
    sum.
    """
    if compressor.gathers:
        return GatheredMean(transport, like, compressor, shares=shares, average=average)
    return ChunkedMean(transport, like, compressor, codec, shares=shares, average=average)
