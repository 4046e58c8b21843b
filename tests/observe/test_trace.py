"""Traces: one process a rank and one track a thread, well formed, and in agreement with torch.profiler."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from murmura import DDP, Transport, UsageError, run_world
from murmura.observe import Observer, merge_traces
from observe.clocks import batch, small_model
from worlds import SECONDS

STEPS = 3


def train(transport: Transport, folder: Path, algorithm: str) -> None:
    ddp = DDP(small_model(), transport, algorithm=algorithm, bucket_size_bytes=64)
    optimizer = SGD(ddp.parameters(), lr=0.125)
    with Observer(ddp, trace=folder):
        for _ in range(STEPS):
            ddp(batch(transport.rank)).sum().backward()
            optimizer.step()
    ddp.close()


def merged(folder: Path) -> list[dict[str, Any]]:
    merge_traces(folder, folder / "trace.json")
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())
    return events


def spans_by_track(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return {track: sorted(spans, key=lambda span: (span["ts"], -span["dur"])) for track, spans in tracks.items()}


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_ranks_are_processes_and_threads_are_tracks_of_nested_spans(tmp_path: Path, algorithm: str) -> None:
    run_world(train, 2, tmp_path, algorithm, timeout=SECONDS)
    events = merged(tmp_path)
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert [each["args"]["name"] for each in events if each["name"] == "process_name"] == ["rank 0", "rank 1"]
    tracks = spans_by_track(events)
    assert set(tracks) == set(names)
    for rank in range(2):
        assert names[rank, 0] == "training"
        assert any(track[0] == rank and f"-rank{rank}" in name for track, name in names.items())
        steps = [span for span in tracks[rank, 0] if "step " in span["name"]]
        assert [span["name"] for span in steps] == [f"murmura::step {step}" for step in range(STEPS)]
        assert any(span["name"] == "murmura::all_reduce" for track in tracks for span in tracks[track])
    for spans in tracks.values():
        open_until: list[float] = []
        for span in spans:
            began, ended = span["ts"], span["ts"] + span["dur"]
            while open_until and open_until[-1] <= began + 0.5:  # a double counts microseconds since 1970 in quarters
                open_until.pop()
            assert not open_until or ended <= open_until[-1] + 0.5, "spans of one track overlap"
            open_until.append(ended)


def test_the_trace_of_a_run_that_was_killed_still_opens(tmp_path: Path) -> None:
    run_world(train, 2, tmp_path, "gradient_allreduce", timeout=SECONDS)
    whole = merged(tmp_path)
    path = tmp_path / "rank-1.trace.json"
    path.write_text(path.read_text()[:-30])
    assert merged(tmp_path) == whole[:-1]


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace"):
        merge_traces(tmp_path, tmp_path / "trace.json")


def test_torch_profiler_shows_the_same_ranges(tmp_path: Path) -> None:
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip("this torch profiles one thread only")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
        run_world(train, 2, tmp_path, "gradient_allreduce", timeout=SECONDS)
    of_torch = defaultdict(list)
    for event in profiled.events():
        if event.name.startswith("murmura::"):
            of_torch[event.thread].append((event.time_range.start, event.name))
    ours = [
        [span["name"] for span in spans if "step " not in span["name"]]
        for spans in spans_by_track(merged(tmp_path)).values()
    ]
    assert sorted([name for _, name in sorted(events)] for events in of_torch.values()) == sorted(ours)
