"""Measure where the time of every training step goes on every rank, and how many bytes are sent.

An `Observer` measures a DDP and writes a `Record` a step to its sinks; a trace opens in Perfetto. Without an observer
nothing is measured.
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
