"""How values become fewer bytes: pure tensor code, no transport in sight.

`__all__` holds what is built; the other names are declared signatures whose use raises UsageError.
"""

from murmura.compressors.base import Compressor as Compressor
from murmura.compressors.cast import Cast as Cast
from murmura.compressors.error_feedback import ErrorFeedback as ErrorFeedback
from murmura.compressors.minmax import MinMaxUInt8 as MinMaxUInt8

__all__: list[str] = []
