"""Traces in the Trace Event format, for Perfetto and chrome://tracing: one process per rank, one track per thread.

Times are microseconds since the epoch, so traces of several hosts are aligned as well as their clocks are. A file is an
array with one event per line: it opens even if the run was killed before the last bracket.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from murmura.errors import UsageError
from murmura.observe.span_log import PREFIX
from murmura.observe.spans import Span


class TraceFile:
    """The trace of one rank, `folder`/rank-<rank>.trace.json; a file of an earlier run is replaced.

    `thread` is the training thread; `epoch_ns` is added to a span's time to get the time since the epoch.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, thread: int, epoch_ns: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._epoch_ns = epoch_ns
        self._training = thread
        self._tracks = {thread: 0}  # by thread
        self._file: IO[str] = open(Path(folder) / f"rank-{rank}.trace.json", "w", encoding="utf-8")
        self._file.write("[\n")
        self._write(self._name("process_name", 0, f"rank {rank}"), is_first=True)
        self._write({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        self._write(self._name("thread_name", 0, "training"))

    def write(self, spans: Sequence[Span], thread_names: Mapping[int, str]) -> None:
        """Add ended spans; a new thread gets a track with its name."""
        lines = []
        for span in spans:
            track = self._tracks.get(span.thread)
            if track is None:
                track = self._tracks[span.thread] = len(self._tracks)
                self._write(self._name("thread_name", track, thread_names[span.thread]))
            lines.append(self._span(span, track))
        if lines:
            self._file.write(",\n" + ",\n".join(lines))
            self._file.flush()

    def write_step(self, step: int, began_ns: int, ended_ns: int) -> None:
        """Add the span of a whole step to the track of the training thread."""
        self.write([Span(f"{PREFIX}step {step}", self._training, began_ns, ended_ns, False, False)], {})

    def close(self) -> None:
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def _span(self, span: Span, track: int) -> str:
        # Formatted by hand: json takes several times as long. The names are murmura's and need no escapes.
        began, took = span.began_ns + self._epoch_ns, span.ended_ns - span.began_ns
        args = f'{{"bytes": {span.sent_bytes}}}' if span.operation else "{}"
        return (
            f'{{"name": "{span.name}", "cat": "murmura", "ph": "X", "pid": {self._rank}, "tid": {track}, '
            f'"ts": {began / 1000}, "dur": {took / 1000}, "args": {args}}}'
        )

    def _name(self, what: str, track: int, name: str) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": self._rank, "tid": track, "args": {"name": name}}

    def _write(self, event: Mapping[str, Any], *, is_first: bool = False) -> None:
        self._file.write(("" if is_first else ",\n") + json.dumps(event))


def merge_traces(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Merge the traces of all ranks in `folder` into one `file` that opens in Perfetto."""
    traces = sorted(Path(folder).glob("rank-*.trace.json"))
    if not traces:
        raise UsageError(f"there is no trace in {folder}. Observe with trace={str(folder)!r} first.")
    events: list[str] = []
    for trace in traces:
        events += _events(trace.read_text(encoding="utf-8"))
    Path(file).write_text("[\n" + ",\n".join(events) + "\n]\n", encoding="utf-8")


def _events(text: str) -> list[str]:
    lines = [line.removesuffix(",") for line in text.splitlines() if line.startswith("{")]
    try:
        json.loads(lines[-1])
    except ValueError:  # an incomplete line: the run was killed
        lines.pop()
    return lines
