"""Compressors: pure tensor code that turns values into fewer bytes."""

from murmura.compressors.base import Compressor
from murmura.compressors.cast import Cast
from murmura.compressors.error_feedback import ErrorFeedback
from murmura.compressors.minmax import MinMaxUInt8

__all__ = ["Cast", "Compressor", "ErrorFeedback", "MinMaxUInt8"]
