"""Compressors: pure tensor code that turns values into fewer bytes."""

from murmura.compressors.base import Compressor
from murmura.compressors.cast import Cast
from murmura.compressors.error_feedback import ErrorFeedback
from murmura.compressors.minmax import MinMaxUInt8
from murmura.compressors.minmax_four import MinMaxUInt4
from murmura.compressors.names import compressor_named, compressor_names, register_compressor
from murmura.compressors.sign import Sign
from murmura.compressors.sparse import RandomK, TopK
from murmura.compressors.sparse_two_bit import TopKTwoBit

__all__ = [
    "Cast",
    "Compressor",
    "ErrorFeedback",
    "MinMaxUInt4",
    "MinMaxUInt8",
    "RandomK",
    "Sign",
    "TopK",
    "TopKTwoBit",
    "compressor_named",
    "compressor_names",
    "register_compressor",
]
