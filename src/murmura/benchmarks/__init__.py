"""Benchmarks: murmura beside its peers, measured in one run by the same processes. No output, no command line."""

from murmura.benchmarks.all_reduce import run_all_reduce
from murmura.benchmarks.progress import Progress
from murmura.benchmarks.report import Report, Row
from murmura.benchmarks.sizes import format_size, parse_sizes
from murmura.benchmarks.spec import AllReduceSpec, Peer, parse_peers

__all__ = [
    "AllReduceSpec",
    "Peer",
    "Progress",
    "Report",
    "Row",
    "format_size",
    "parse_peers",
    "parse_sizes",
    "run_all_reduce",
]
