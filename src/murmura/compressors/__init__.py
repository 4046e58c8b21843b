"""Compressors: pure tensor code that turns values into fewer bytes."""

from murmura.compressors.base import Compressor
from murmura.compressors.cast import Cast
from murmura.compressors.error_feedback import ErrorFeedback
from murmura.compressors.minmax import MinMaxUInt8
from murmura.compressors.names import compressor_named, compressor_names, register_compressor

__all__ = [
    "Cast",
    "Compressor",
    "ErrorFeedback",
    "MinMaxUInt8",
    "compressor_named",
    "compressor_names",
    "register_compressor",
]
