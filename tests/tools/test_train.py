"""`murmura train` from its options to its folder: two ranks, small tasks, and a Ctrl-C in the middle."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from murmura.observe import Record
from murmura.tools.cli.live_view import Lines, Watch, line, view
from murmura.tools.cli.main import app
from murmura.tools.experiments.runs import Run, RunFolder, only_writer
from murmura.tools.experiments.settings import TrainSettings
from worlds import SECONDS

PATIENCE = 5.0  # in which all ranks must have ended after Ctrl-C


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["train", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def small(folder: Path, *more: str, task: str = "mlp", steps: int = 20) -> tuple[str, ...]:
    return ("--task", task, "--ranks", "2", "--steps", str(steps), "--out", str(folder), *more)


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / f"checkpoints/step-{step:09}/model.pt", weights_only=True)
    return state


@pytest.mark.parametrize("transport", ["in_process", "shared_memory", "gloo"])
def test_a_run_leaves_its_settings_its_records_and_its_result(tmp_path: Path, transport: str) -> None:
    folder = tmp_path / "a run"
    status, told, progress = run(*small(folder, "--transport", transport, "--checkpoint-every", "10"))
    assert status == 0
    assert f"murmura report '{folder}'" in told
    assert "step 20/20" in progress
    found = Run.read(folder)
    assert found.status == "finished"
    assert found.settings["transport"] == transport
    assert found.machine["torch"] == torch.__version__
    assert f"held-out loss {found.result['loss']:.4f} after 20 steps" in told
    assert sorted(found.records) == [0, 1]
    for records in found.records.values():
        assert [record.step for record in records] == list(range(20))
        assert all("loss" in record.logged for record in records)
        assert records[-1].logged["held_out"] == found.result["loss"] < records[0].logged["first_loss"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000000010", "step-000000020"]


def test_records_hold_training_and_not_what_is_done_between_steps(tmp_path: Path) -> None:
    run(*small(tmp_path / "run", "--transport", "in_process", "--checkpoint-every", "1"))
    for record in Run.read(tmp_path / "run").records[0][2:]:  # in the second round the order of buckets is settled
        assert set(record.bytes) == {"all_reduce"}
        elements = record.bytes["all_reduce"] / 4
        assert 5313 <= elements < 5313 + 32  # the parameters and the round's tail: no evaluation, no checkpoint


def test_a_slow_link_is_slow(tmp_path: Path) -> None:
    run(*small(tmp_path / "run", "--transport", "in_process", "--bandwidth", "10mbit", steps=5))
    records = Run.read(tmp_path / "run").records[1]
    least_ms = 4 * 5313 * 8 / 10e6 * 1000  # two ranks: each sends the gradients once
    # In all: a step that ends late, because the machine is busy, leaves less of the link's time to the next one.
    assert sum(record.wall_ms for record in records) > 5 * least_ms


def test_a_trace_has_a_process_for_each_rank(tmp_path: Path) -> None:
    status, told, _ = run(
        *small(tmp_path / "run", "--trace", str(tmp_path / "trace.json"), "--transport", "in_process")
    )
    assert status == 0
    assert str(tmp_path / "trace.json") in told
    assert {event["pid"] for event in json.loads((tmp_path / "trace.json").read_text())} == {0, 1}


# Interruption


def heed_interrupts() -> None:
    """A shell lets what it runs in the background ignore Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "murmura", "train", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, **pipes, text=True, start_new_session=True, preexec_fn=heed_interrupts)


def await_path(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of its session but for itself and its children, which are the servers that ranks come from."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, parent, _, session, *_ = (folder / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if int(session) == process.pid and state not in "ZX" and process.pid not in (int(folder.name), int(parent)):
                found.append(int(folder.name))
    return found


def seconds_until_ranks_end(process: subprocess.Popen[str]) -> float:
    began = time.monotonic()
    while ranks_of(process):
        assert time.monotonic() - began < SECONDS
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.mark.timed
@pytest.mark.timeout(180)
@pytest.mark.parametrize("algorithm", ["bytegrad", pytest.param("shift_one", marks=pytest.mark.slow)])
def test_ctrl_c_ends_all_ranks_and_resume_comes_to_the_same_bits(tmp_path: Path, algorithm: str) -> None:
    options = ("--algorithm", algorithm, "--checkpoint-every", "7")
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    process = start(*small(cut, *options, task="markov", steps=60))
    try:
        await_path(cut / "checkpoints" / "step-000000014", process)
        assert len(ranks_of(process)) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert seconds_until_ranks_end(process) < PATIENCE
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    *_, named, advice = said.splitlines()
    latest = max((cut / "checkpoints").glob("step-*"))
    assert named.endswith(str(latest))
    assert advice == f"go on with: murmura train --resume {cut}"
    assert json.loads((cut / "run.json").read_text())["status"] == "interrupted"

    assert run("--resume", str(cut))[0] == 0
    assert run(*small(whole, *options, task="markov", steps=60))[0] == 0
    resumed, uninterrupted = Run.read(cut), Run.read(whole)
    assert resumed.result["loss"] == uninterrupted.result["loss"]
    assert all(torch.equal(tensor, weights(whole, 60)[name]) for name, tensor in weights(cut, 60).items())
    for rank in (0, 1):
        losses = [[record.logged["loss"] for record in each.records[rank]] for each in (resumed, uninterrupted)]
        assert len(losses[0]) == 60
        assert losses[0] == losses[1]


@pytest.mark.slow
def test_an_interruption_before_the_first_checkpoint_says_so(tmp_path: Path) -> None:
    process = start(*small(tmp_path / "run", "--checkpoint-every", "0", steps=100_000))
    try:
        await_path(tmp_path / "run" / "metrics" / "from-000000000" / "rank-1.jsonl", process)
        process.send_signal(signal.SIGINT)  # to the command alone, as `kill -INT` does
        assert seconds_until_ranks_end(process) < PATIENCE
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted before the first checkpoint" in said
    status, _, refusal = run("--resume", str(tmp_path / "run"))
    assert status == 2
    assert "has left no checkpoint" in refusal


# Settings


def test_a_file_holds_settings_and_flags_win(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('task = "mlp"\nranks = 3\nsteps = 4\nseed = 5\ntransport = "in_process"\n')
    assert run("--config", str(config), "--ranks", "2", "--out", str(tmp_path / "run"))[0] == 0
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert (settings["task"], settings["ranks"], settings["steps"], settings["seed"]) == ("mlp", 2, 4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "chess"), "task 'chess' is unknown. Known: 'charlm', 'markov', 'mlp'."),
        (("--algorithm", "magic"), "algorithm='magic' is unknown."),
        (("--ranks", "0"), "ranks=0: give a number from 1 to 64."),
        (("--steps", "0"), "steps=0: give a number at least 1."),
        (("--bandwidth", "fast"), "bandwidth='fast': write bits per second"),
        (("--transport", "carrier pigeon"), "transport='carrier pigeon' is unknown."),
        (("--transport", "mpi"), "transport='mpi' is unknown."),
        (("--transport", "nccl"), "transport='nccl' joins ranks on a GPU. Add device='cuda'."),
        (("--device", "tpu"), "device='tpu' is unknown. Take cpu or cuda."),
        (("--config", "none.toml"), "--config none.toml cannot be read: No such file or directory."),
        (("--config", "broken.toml"), "--config broken.toml is not TOML: "),
        (("--config", "unknown.toml"), "--config unknown.toml: 'rnaks', 'colour' is no setting. There are: task,"),
        (("--config", "mistyped.toml"), "ranks='four' is no int."),
        (("--out", "broken.toml/run"), "a run cannot be written to broken.toml/run: Not a directory"),
        (("--out", "/proc/run"), "a run cannot be written to /proc/run: "),
        (("--out", "done"), "done holds a run already. Go on with it (--resume done), or name another folder."),
        (("--resume", "nowhere"), "there is no folder nowhere."),
        (("--resume", "."), ". holds no run: there is no run.json in it."),
        (("--resume", "done"), "the run in done has taken all its 3 steps."),
        (("--resume", "done", "--algorithm", "qadam"), "algorithm is 'gradient_allreduce', not 'qadam' there."),
        (("--resume", "done", "--out", "other"), "--out and --resume contradict each other"),
        (("--trace", "nowhere/t.json"), "--trace nowhere/t.json: there is no folder nowhere."),
    ],
)
def test_bad_input_is_one_clear_line(
    done: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(done)
    status, told, refusal = run(*arguments)
    assert status == 2
    assert told == ""
    assert refusal.startswith("error: ")
    assert message in refusal
    assert refusal.count("\n") == 1
    assert "Traceback" not in refusal


def test_a_second_run_does_not_write_into_the_folder_of_the_first(tmp_path: Path) -> None:
    short = small(tmp_path, "--transport", "in_process", "--checkpoint-every", "3", steps=5)
    with only_writer(tmp_path):
        status, _, refusal = run(*short)
        assert (status, os.listdir(tmp_path)) == (2, [".lock"])
        assert refusal.startswith(f"error: {tmp_path}: another ")
    assert run(*short)[0] == 0
    shutil.rmtree(tmp_path / "checkpoints/step-000000005")
    before = (tmp_path / "run.json").read_text()
    with only_writer(tmp_path):
        assert run("--resume", str(tmp_path))[0] == 2
    assert (tmp_path / "run.json").read_text() == before
    assert run("--resume", str(tmp_path))[0] == 0


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and some bad files."""
    folder = tmp_path_factory.mktemp("done")
    (folder / "broken.toml").write_text("ranks = = 4")
    (folder / "unknown.toml").write_text("rnaks = 4\ncolour = 'red'\n")
    (folder / "mistyped.toml").write_text("ranks = 'four'\n")
    assert run(*small(folder / "done", "--transport", "in_process", steps=3))[0] == 0
    return folder


def test_records_that_do_not_fit_on_the_disk_end_the_run_with_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_on_a_full_disk(path: Path, *how: Any, **options: Any) -> Any:
        return open("/dev/full" if path.name == "rank-1.jsonl" else path, *how, **options)

    monkeypatch.setattr("murmura.observe.sinks.open", open_on_a_full_disk, raising=False)
    records = tmp_path / "metrics/from-000000000"
    status, _, refusal = run(*small(tmp_path, "--transport", "in_process"))
    assert status == 1
    assert refusal.endswith(f"cannot be written to {records}/rank-1.jsonl: No space left on device.\n")
    assert "No space left" in json.loads((tmp_path / "run.json").read_text())["result"]["error"]


def test_every_fault_is_told_at_once() -> None:
    status, _, refusal = run("--task", "chess", "--ranks", "0", "--bandwidth", "fast")
    assert status == 2
    assert all(word in refusal for word in ("'chess'", "ranks=0", "'fast'"))


# The live view


def watched(ranks: int = 4, steps: int = 400) -> Watch:
    """A run in the middle, rank 2 slow."""
    settings = TrainSettings(task="charlm", ranks=ranks, steps=steps, algorithm="low_precision_decentralized")
    now = iter(range(10_000))
    watch = Watch(Path("nowhere"), settings, 0, clock=lambda: float(next(now)))
    for step in range(120):
        for rank in range(ranks):
            compute = 60.0 if rank == 2 else 30.0
            watch.add(
                Record(
                    step=step,
                    rank=rank,
                    time=float(step),
                    wall_ms=71.0,
                    compute_ms=compute,
                    waited_ms=71.0 - compute,
                    exchange_ms=20.0,
                    hidden_ms=10.0,
                    bytes={"exchange": 859_328},
                    logged={"loss": 2.5, **({"held_out": 2.4567, "consensus": 1.2e-3} if step == 100 else {})},
                )
            )
    return watch


def drawn(watch: Watch, columns: int, *, encoding: str = "utf-8", colour: bool = False) -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    Console(file=out, width=columns, force_terminal=colour, no_color=not colour).print(view(watch))
    out.flush()
    return out.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_view_fits(columns: int, encoding: str) -> None:
    lines = drawn(watched(), columns, encoding=encoding)
    assert len(lines) == 3 + 1 + 4
    assert all(len(each) <= columns for each in lines)
    assert not any("…" in each for each in lines)
    text = "\n".join(lines)
    for words in ("step 120/400", "left", "loss 2.5000", "held out 2.4567 at step 101", "replicas 1.2e-03 apart"):
        assert words in text
    rows = lines[-4:]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row.rstrip().endswith("slowest") for row in rows] == [False, False, True, False]
    for row, numbers in zip(rows, ("30.0", "30.0", "60.0", "30.0"), strict=True):
        assert row.split()[-6 if row is rows[2] else -5] == numbers
    marks = "#=." if encoding == "ascii" else "█▓░"
    counts = [[row.count(mark) for mark in marks] for row in rows]
    if encoding == "ascii":
        counts = [[row.split()[1].count(mark) for mark in marks] for row in rows]
    bar = sum(counts[0])
    assert all(sum(each) == bar for each in counts)
    assert counts[2][0] > 2 * counts[0][0]  # rank 2 computes 50 ms alone, the others 20
    assert counts[0][2] > counts[2][2]


def test_colour_is_used_only_where_there_is_some() -> None:
    assert "\x1b[" not in "".join(drawn(watched(), 80))
    assert "\x1b[34m" in "".join(drawn(watched(), 80, colour=True))


def test_before_the_first_record_the_view_says_what_is_to_come() -> None:
    watch = Watch(Path("nowhere"), TrainSettings(ranks=2), 0)
    watch.poll()
    text = "\n".join(drawn(watch, 80))
    assert text.count("starting") == 3
    assert "step 0/400" in text


def test_a_line_is_said_for_each_evaluation_and_in_one_piece() -> None:
    watch = watched()
    told: list[str] = []
    lines = Lines(watch, told.append)
    lines.tell()
    lines.tell(at_once=True)
    lines.tell(at_once=True)
    assert len(told) == 1
    assert told[0].rpartition("  ")[0] == line(watch).rpartition("  ")[0]  # but for the time left
    assert "\n" not in told[0]
    assert told[0].startswith("step 120/400  loss 2.5000  held out 2.4567  71.0 ms a step (compute 37.5, hidden 10.0, ")
    assert "slowest rank 2" in told[0]


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    part = folder.part(0)
    part.mkdir(parents=True)
    record = watched().recent[0][0]
    watch = Watch(part, TrainSettings(ranks=1), 0)
    with (part / "rank-0.jsonl").open("w") as file:
        file.write(record.to_json()[:50])
        file.flush()
        watch.poll()
        assert watch.recent == {}
        file.write(record.to_json()[50:] + "\n")
        file.flush()
        watch.poll()
    watch.close()
    assert list(watch.recent[0]) == [record]
