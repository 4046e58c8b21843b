"""Observing training: where the time of every step goes on every rank, and what is sent.

`Observer` watches a DDP; sinks take its records; a trace opens in Perfetto. Nobody who does not observe pays for it.
"""

from murmura.observe.observer import Observer
from murmura.observe.record import Record
from murmura.observe.sinks import Callback, JSONLines, Sink, TensorBoard, latest_records, read_records
from murmura.observe.trace import merge_traces

__all__ = [
    "Callback",
    "JSONLines",
    "Observer",
    "Record",
    "Sink",
    "TensorBoard",
    "latest_records",
    "merge_traces",
    "read_records",
]
