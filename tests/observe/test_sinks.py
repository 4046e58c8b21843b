"""Files of JSON lines, seen from inside and outside of a run; TensorBoard, here and missing."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from murmura import DDP, ConfigError, MurmuraError, Transport, run_world
from murmura.observe import JSONLines, Observer, Record, TensorBoard, latest_records, read_records
from observe.clocks import batch, small_model
from worlds import SECONDS

RECORD = Record(
    step=3,
    rank=1,
    time=1.5,
    wall_ms=10.0,
    compute_ms=7.0,
    waited_ms=3.0,
    exchange_ms=5.0,
    hidden_ms=2.0,
    bytes={"all_reduce": 64},
    waiting={0: 2.5},
    logged={"loss": 0.5},
)


def test_a_record_survives_its_line() -> None:
    line = RECORD.to_json()
    assert Record.from_json(line) == RECORD
    assert set(json.loads(line)) == {
        "step", "rank", "time", "wall_ms", "compute_ms", "waited_ms", "exchange_ms", "hidden_ms", "bytes", "waiting",
        "logged",
    }  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [{"step": "x"}, {"wall_ms": []}, {"bytes": 3}, {"logged": {"loss": "x"}}, {"waiting": "x"}, {"time": 10**400}],
)
def test_a_line_that_no_record_has_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(damage))} cannot be "):
        Record.from_json(json.dumps({**json.loads(RECORD.to_json()), **damage}))
    with pytest.raises(ValueError, match="is no record"):
        Record.from_json("[1]")


def test_records_that_cannot_be_written_say_where(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    records = JSONLines(tmp_path)
    records.open(0)
    with pytest.raises(MurmuraError, match=r"rank-0\.jsonl: No space left on device"):
        records.write(RECORD)
    records.close()


def train(transport: Transport, folder: Path) -> list[Record]:
    records: list[Record] = []
    ddp = DDP(small_model(), transport)
    with Observer(ddp, [JSONLines(folder), records.append]) as observer:
        for step in range(3):
            ddp(batch(transport.rank)).sum().backward()
            observer.log(loss=step)
            if step == 2:  # two records are complete, and visible from outside
                assert latest_records(folder)[transport.rank] == records[1]
    ddp.close()
    return records


def test_a_run_can_be_watched_from_outside_and_read_afterwards(tmp_path: Path) -> None:
    records = run_world(train, 2, tmp_path / "run", timeout=SECONDS)
    assert read_records(tmp_path / "run") == dict(enumerate(records))
    assert latest_records(tmp_path / "run") == {rank: of_rank[-1] for rank, of_rank in enumerate(records)}
    assert [each.logged for each in records[0]] == [{"loss": 0}, {"loss": 1}, {"loss": 2}]


def test_half_a_line_is_left_for_later(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text(RECORD.to_json() + "\n" + RECORD.to_json()[:20])
    (tmp_path / "rank-11.jsonl").write_text(RECORD.to_json()[:20])
    assert read_records(tmp_path) == {0: [RECORD], 11: []}
    assert latest_records(tmp_path) == {0: RECORD}


def test_the_newest_line_of_a_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text((RECORD.to_json() + "\n") * 1000)
    assert latest_records(tmp_path) == {0: RECORD}


def test_a_folder_without_records_has_none(tmp_path: Path) -> None:
    assert read_records(tmp_path) == latest_records(tmp_path / "missing") == {}


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            written.append(folder)

        def add_scalar(self, *what: Any) -> None:
            written.append(what)

        def close(self) -> None:
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    sink = TensorBoard(tmp_path)
    sink.open(1)
    sink.write(RECORD)
    sink.close()
    assert written[0] == str(tmp_path / "rank-1")
    assert written[-1] == "closed"
    numbers = {name: (value, step) for name, value, step in written[1:-1]}
    assert numbers == {
        "wall_ms": (10.0, 3),
        "compute_ms": (7.0, 3),
        "waited_ms": (3.0, 3),
        "exchange_ms": (5.0, 3),
        "hidden_ms": (2.0, 3),
        "bytes/all_reduce": (64, 3),
        "waiting/0": (2.5, 3),
        "logged/loss": (0.5, 3),
    }


def test_a_missing_tensorboard_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'murmura\[tensorboard\]'"):
        TensorBoard(tmp_path)
