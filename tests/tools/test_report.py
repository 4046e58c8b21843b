"""`murmura report`: what stands in the page, and that a real browser draws it without asking the network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from murmura.observe import JSONLines, Record
from murmura.tools.cli.main import app
from murmura.tools.experiments.breakdown import Breakdown, readable_bytes, straggler, wire_bytes
from murmura.tools.experiments.report import curve
from murmura.tools.experiments.runs import FINISHED, Run, RunFolder, described
from murmura.tools.experiments.settings import TrainSettings
from tools import browser

STEPS = 12


def record(rank: int, step: int, loss: float = 2.0) -> Record:
    """Rank 1 is slow; everybody sends 1000 bytes."""
    compute, waited = (8.0, 1.0) if rank == 1 else (4.0, 5.0)
    return Record(
        step=step,
        rank=rank,
        time=float(step),
        wall_ms=compute + waited,
        compute_ms=compute,
        waited_ms=waited,
        exchange_ms=3.0,
        hidden_ms=2.0,
        bytes={"all_reduce": 1000},
        waiting={1: 4.0} if rank != 1 else {},
        logged={"loss": loss, **({"first_loss": 3.0} if step == 0 else {}), "held_out": 2 - step / 10},
    )


def make_run(path: Path, algorithm: str = "bytegrad", *, steps: int = STEPS, bandwidth: str | None = None) -> Path:
    folder = RunFolder.create(path)
    settings = TrainSettings(task="markov", ranks=2, steps=STEPS, algorithm=algorithm, bandwidth=bandwidth)
    machine = {"cpu": "one <fast> & only", "cores": 2, "torch": "2", "murmura": "0"}
    folder.write({**described(settings, FINISHED, loss=0.9, floor=0.5), "machine": machine})
    write_records(folder, 0, steps)
    return path


def write_records(folder: RunFolder, begin: int, end: int, loss: float = 2.0) -> None:
    for rank in range(2):
        sink = JSONLines(folder.part(begin))
        sink.open(rank)
        for step in range(begin, end):
            sink.write(record(rank, step, loss))
        sink.close()


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


class Page(HTMLParser):
    """What a page holds; an element that is left open or closed twice is an error."""

    VOID = frozenset({"meta", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "action", "data", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_holds_all_there_is_and_fetches_nothing(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", "qadam"), make_run(tmp_path / "three", "shift_one")]
    out = tmp_path / "page.html"
    status, told, _ = run(*runs, "--out", out)
    assert (status, told) == (0, f"{out}\n")
    text = out.read_text()
    page = Page(text)
    assert page.tags.count("svg") == 4 + 3 * 2
    assert "script" not in page.tags
    assert page.links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    words = " ".join(page.words)
    for title in ("Loss over time", "Loss over steps", "Loss over bytes", "Where a step's time goes", "Time of a step"):
        assert title in words
    assert "one <fast> & only" in words
    assert words.count("rank 1 (slowest)") == 3
    assert "rank 1, 4.00 ms a step" in words
    for setting in TrainSettings().__dict__:
        assert setting.replace("_", " ") in words


def test_runs_on_different_links_are_not_drawn_over_each_other(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "fast"), make_run(tmp_path / "slow", bandwidth="100mbit")]
    run(*runs, "--out", tmp_path / "page.html")
    words = " ".join(Page((tmp_path / "page.html").read_text()).words)
    assert "markov, 2 ranks, 100mbit" in words
    assert "markov, 2 ranks, no limit to bandwidth" in words


def test_a_curve_counts_time_and_bytes_of_the_steps_before_it(tmp_path: Path) -> None:
    points = curve(Run.read(make_run(tmp_path / "run")))
    assert points[0] == (0, 0.0, 0.0, 3.0)
    assert len(points) == STEPS + 1
    assert points[3].steps == 3
    assert points[3].seconds == pytest.approx(3 * 0.009)
    assert points[3].megabytes == pytest.approx(3 * 1000e-6)  # two ranks: each sends an all-reduced tensor once


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    write_records(RunFolder(path), 5, 9, loss=7.0)
    records = Run.read(path).records[1]
    assert [each.step for each in records] == list(range(9))
    assert [each.logged["loss"] for each in records] == [2.0] * 5 + [7.0] * 4


def test_a_run_that_goes_on_can_be_drawn(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=3)
    with (path / "metrics" / "from-000000000" / "rank-0.jsonl").open("a") as file:
        file.write(record(0, 3).to_json() + "\n" + record(0, 4).to_json()[:30])
    assert run(path, "--out", tmp_path / "page.html")[0] == 0


def test_the_folder_of_a_comparison_stands_for_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "alone")
    for algorithm in ("diloco", "shift_one"):
        (tmp_path / "compare/100mbit").mkdir(parents=True, exist_ok=True)
        make_run(tmp_path / "compare/100mbit" / algorithm, algorithm)
    status, told, _ = run("alone", "compare")
    assert (status, told) == (0, "report.html\n")
    page = (tmp_path / "report.html").read_text()
    assert "3 runs" in page
    assert all(algorithm in page for algorithm in ("bytegrad", "diloco", "shift_one"))


def test_who_computes_longest_is_the_straggler() -> None:
    means = {rank: Breakdown.of([record(rank, 0)], 2) for rank in range(3)}
    assert straggler(means) == 1
    assert straggler(dict.fromkeys(range(3), means[0])) is None
    assert straggler({0: means[0]}) is None
    assert means[0].parts == (2.0, 2.0, 5.0)


def test_bytes_on_the_wire() -> None:
    assert wire_bytes({"all_reduce": 1000, "exchange": 10}, 4) == 1510
    assert wire_bytes({"all_to_all": 1000}, 4) == 750
    assert wire_bytes({"all_reduce": 1000}, 1) == 0
    assert [readable_bytes(each) for each in (950, 12_345, 4.56e6, 2e9)] == ["950 B", "12.3 kB", "4.56 MB", "2.00 GB"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "there is no folder nowhere. Name the folder of a run"),
        (("empty",), "empty holds no run: there is no run.json in it."),
        (("damaged",), "damaged/run.json cannot be read: "),
        (("newer",), "newer/run.json is not of version 1"),
        (("partial",), "partial/run.json is damaged: machine is missing or wrong."),
        (("garbled",), "garbled/run.json is damaged: settings.task, machine.cpu, result.floor, status is missing or"),
        (("torn",), "the records in torn/metrics cannot be read: wall_ms cannot be 'x'."),
        (("unstarted",), "none of these runs has taken a step yet."),
        (("good", "--out", "nowhere/page.html"), "--out nowhere/page.html: there is no folder nowhere."),
        (("good", "--out", "empty"), "--out empty is a folder. Name a file in it."),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "damaged": "{",
        "newer": json.dumps({"schema_version": 2}),
        "partial": json.dumps({"schema_version": 1, "settings": {}}),
        "garbled": json.dumps(
            {
                "schema_version": 1,
                "settings": {"ranks": 2, "algorithm": "bytegrad"},
                "machine": {"cpu": []},
                "result": {"floor": "x"},
            }
        ),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "good")
    make_run(tmp_path / "unstarted", steps=0)
    make_run(tmp_path / "torn")
    for records in (tmp_path / "torn" / "metrics").glob("*/rank-0.jsonl"):
        records.write_text(re.sub('"wall_ms": [^,]*', '"wall_ms": "x"', records.read_text()))
    status, told, refusal = run(*arguments)
    assert status == 2
    assert told == ""
    assert refusal.startswith("error: ")
    assert message in refusal
    assert refusal.count("\n") == 1


# In a real browser

LOOK = """
(() => {
  const boxes = [...document.querySelectorAll("svg")].map(each => each.getBoundingClientRect());
  const curves = [...document.querySelectorAll("polyline")].map(each => each.getTotalLength());
  const bars = [...document.querySelectorAll("svg rect:not(.paper)")].map(each => each.getBoundingClientRect().width);
  return {
    paper: getComputedStyle(document.body).backgroundColor,
    chart: getComputedStyle(document.querySelector("svg .paper")).fill,
    smallest: Math.min(...boxes.filter(each => each.width).map(each => Math.min(each.width, each.height))),
    charts: boxes.filter(each => each.width).length,
    curves: curves.filter(each => each > 100).length,
    bars: bars.filter(each => each > 20).length,
    overflow: document.documentElement.scrollWidth - innerWidth,
  };
})()
"""


needs_browser = pytest.mark.skipif(browser.find() is None, reason="no Chromium is installed")


def complaints(events: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What the console of the browser would show."""
    names = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    return [event for event in events if event[0] in names]


def requests(events: list[tuple[str, dict[str, Any]]]) -> set[str]:
    urls = [params["request"]["url"] for method, params in events if method == "Network.requestWillBeSent"]
    return {url for url in urls if not url.startswith("data:")}


@needs_browser
def test_a_browser_draws_the_page_in_light_and_dark_and_asks_for_nothing(tmp_path: Path) -> None:
    run(make_run(tmp_path / "one"), make_run(tmp_path / "two", "qadam"), "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").as_uri()
    with browser.Browser(tmp_path / "profile", 1200, 900) as chromium:
        chromium.open(page)
        looks = {}
        for scheme in ("light", "dark"):
            chromium.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            looks[scheme] = chromium.evaluate(LOOK)
        chromium.call("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
        narrow = chromium.evaluate(LOOK)
    assert requests(chromium.events) == {page}
    assert complaints(chromium.events) == []
    assert looks["light"]["paper"] == looks["light"]["chart"] == "rgb(255, 255, 255)"
    assert looks["dark"]["paper"] == looks["dark"]["chart"] == "rgb(13, 17, 23)"
    for look in (*looks.values(), narrow):
        assert look["charts"] == 4 + 2 * 2
        assert look["smallest"] > 50
        assert look["curves"] >= 3 * 2
        assert look["bars"] >= 2 * 3
        assert look["overflow"] <= 0


@needs_browser
def test_a_newcomers_path_from_an_empty_folder_to_a_page_in_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    words = ("train", "--task", "mlp", "--ranks", "2", "--steps", "20", "--transport", "in_process")
    trained = CliRunner().invoke(app, words)
    *_, advice = trained.stdout.splitlines()
    command = advice.removeprefix("look at it: murmura ").split()
    drawn = CliRunner().invoke(app, command)
    page = Path(drawn.stdout.strip()).absolute().as_uri()
    with browser.Browser(tmp_path / "profile", 1200, 900) as chromium:
        chromium.open(page)
        look = chromium.evaluate(LOOK)
    assert requests(chromium.events) == {page}
    assert complaints(chromium.events) == []
    assert look["charts"] == 4 + 2
    assert look["curves"] >= 3 + 2
