"""Means of compressed values, in the way that the compressor declares."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.algorithms.checks import as_compressor, at_least_one, instances_of, yes_or_no
from murmura.algorithms.chunked_mean import ChunkedMean
from murmura.algorithms.codec_thread import CodecThread
from murmura.algorithms.compressed import CompressedMean
from murmura.algorithms.gathered_mean import GatheredMean
from murmura.compressors import Compressor
from murmura.errors import ConfigError
from murmura.transports.base import Transport, check_transport
from murmura.transports.checks import is_whole


def compressed_mean(
    transport: Transport,
    like: Tensor,
    compressor: Compressor | str,
    codec: CodecThread,
    *,
    shares: Sequence[int] | None = None,
    average: bool = True,
) -> CompressedMean:
    """What averages flat tensors like `like`, in the way that `compressor` declares.

    `codec` encodes and decodes beside the exchange where the compressor allows that. With ``average=False`` it is the
    sum.
    """
    check_transport(transport)
    instances_of(Tensor, like=like)
    instances_of(CodecThread, codec=codec)
    yes_or_no(average=average)
    compressor = as_compressor(compressor)
    _check_answers(compressor, like)
    if shares is not None:
        if not isinstance(shares, Sequence) or len(shares) != transport.world_size:
            raise ConfigError(f"shares={shares!r}: give one for each of {transport.world_size} ranks.")
        at_least_one(**{f"shares[{rank}]": share for rank, share in enumerate(shares)})
    if compressor.gathers:
        return GatheredMean(transport, like, compressor, shares=shares, average=average)
    return ChunkedMean(transport, like, compressor, codec, shares=shares, average=average)


def _check_answers(compressor: Compressor, like: Tensor) -> None:
    """Raise `ConfigError` if a compressor, which a user may have written, answers what makes no sense."""
    num_bytes, fresh = compressor.payload_bytes(like.numel(), like.dtype), compressor.for_bucket()
    if not is_whole(num_bytes) or num_bytes < 0:
        raise ConfigError(
            f"compressor={compressor!r}: payload_bytes({like.numel()}, {like.dtype}) returned {num_bytes!r}. Return "
            "the number of bytes, an int."
        )
    if not isinstance(fresh, Compressor):
        raise ConfigError(f"compressor={compressor!r}: for_bucket() returned {fresh!r}. Return a compressor.")
