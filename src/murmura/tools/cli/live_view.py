"""Show a running training on standard error: a view that is redrawn on a terminal, plain lines elsewhere.

Ranks know nothing of it. They write their records to files, and this process reads what is new a few times a second.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from murmura.observe import Record
from murmura.tools.cli.output import digits
from murmura.tools.experiments.breakdown import Breakdown, readable_bytes, straggler
from murmura.tools.experiments.settings import TrainSettings
from murmura.tools.progress import repeating

PER_SECOND = 4
WINDOW = 20  # steps over which a rank's times are averaged
LINE_SECONDS = 10.0  # at most this long without a plain line
PARTS = (("compute", "█", "#", "blue"), ("hidden", "▓", "=", "green"), ("waited", "░", ".", "red"))


class Watch:
    """Follows the record files in `folder`; `poll` reads what is new. Not thread-safe."""

    def __init__(
        self, folder: Path, settings: TrainSettings, start: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.recent: dict[int, deque[Record]] = {}
        self.steps_done = start
        self.held_out: tuple[int, float] | None = None  # the step of the measurement, and the loss
        self.consensus: float | None = None
        self._start = start
        self._folder = folder
        self._clock = clock
        self._first: tuple[int, float] | None = None  # a step, and when it was seen to be done
        self._files: dict[int, tuple[IO[str], str]] = {}  # by rank, with the incomplete last line

    def poll(self) -> None:
        for rank in range(self.settings.ranks):
            path = self._folder / f"rank-{rank}.jsonl"
            if rank not in self._files and path.exists():
                self._files[rank] = path.open(encoding="utf-8"), ""
            if rank in self._files:
                file, rest = self._files[rank]
                *lines, rest = (rest + file.read()).split("\n")
                self._files[rank] = file, rest
                for line in lines:
                    self.add(Record.from_json(line))

    def add(self, record: Record) -> None:
        self.recent.setdefault(record.rank, deque(maxlen=WINDOW)).append(record)
        done = record.step + 1
        if done > self.steps_done:
            self.steps_done = done
            self._first = self._first or (done, self._clock())
        if "held_out" in record.logged:
            self.held_out = done, record.logged["held_out"]
            self.consensus = record.logged.get("consensus")

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()

    @property
    def loss(self) -> float | None:
        """Return the mean loss over all ranks and the last steps."""
        losses = [each.logged["loss"] for recent in self.recent.values() for each in recent if "loss" in each.logged]
        return statistics.fmean(losses) if losses else None

    def by_rank(self) -> dict[int, Breakdown]:
        return {rank: Breakdown.of(recent, self.settings.ranks) for rank, recent in sorted(self.recent.items())}

    def time_left(self) -> str:
        """Return the time left, "0:01:12"; empty as long as it is not known."""
        if self._first is None or not self._first[0] < self.steps_done < self.settings.steps:
            return ""
        first, at = self._first
        seconds = (self._clock() - at) / (self.steps_done - first) * (self.settings.steps - self.steps_done)
        return str(timedelta(seconds=round(seconds)))


# On a terminal


def view(watch: Watch) -> RenderableType:
    """Render the run: progress, loss, and a row for each rank."""
    settings = watch.settings
    ahead = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None):
        ahead.add_column(no_wrap=True, ratio=ratio)
    left = watch.time_left()
    ahead.add_row(
        f"step {watch.steps_done}/{settings.steps}",
        ProgressBar(total=settings.steps, completed=watch.steps_done),
        f"{left} left" if left else "starting" if watch.steps_done < settings.steps else "",
    )
    words = [] if watch.loss is None else [f"loss {watch.loss:.4f}"]
    if watch.held_out is not None:
        words.append(f"held out {watch.held_out[1]:.4f} at step {watch.held_out[0]}")
    if watch.consensus:
        words.append(f"replicas {watch.consensus:.1e} apart")
    return Group(Text(str(settings), style="bold"), ahead, Text(", ".join(words)), _ranks(watch))


def _ranks(watch: Watch) -> Table:
    ranks = watch.by_rank()
    slow = straggler(ranks)
    longest = max((each.step_ms for each in ranks.values()), default=0.0)
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, min_width=8)
    for _ in range(5):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, min_width=7)
    columns = ("step ms", "compute", "hidden", "waited", "sent/s")
    table.add_row(Text("rank", style="dim"), Legend(), *(Text(name, style="dim") for name in columns))
    for rank in range(watch.settings.ranks):
        if (each := ranks.get(rank)) is None:
            table.add_row(str(rank), Text("starting", style="dim"))
            continue
        times = (each.step_ms, each.compute_ms, each.hidden_ms, each.waited_ms)
        table.add_row(
            str(rank),
            Bar(each.parts, longest),
            *map(digits, times),
            readable_bytes(each.bytes_per_second),
            Text("slowest", style="bold red") if rank == slow else "",
        )
    return table


class Bar:
    """A stacked bar in one line; `longest` fills the width. Its parts differ without colour too."""

    def __init__(self, parts: tuple[float, ...], longest: float) -> None:
        self._parts = parts
        self._longest = longest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        reached = 0.0
        for value, (_, mark, plain, colour) in zip(self._parts, PARTS, strict=True):
            before = self._cells(reached, options.max_width)
            reached += value
            cells = self._cells(reached, options.max_width) - before
            yield Segment((plain if options.ascii_only else mark) * cells, Style(color=colour))
        yield Segment(" " * (options.max_width - self._cells(reached, options.max_width)))

    def _cells(self, value: float, width: int) -> int:
        return min(width, round(value / self._longest * width)) if self._longest else 0


class Legend:
    """The legend of a `Bar`, if there is room."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        for name, mark, plain, colour in PARTS:
            words = f" {name} "
            if room < len(words) + 1:
                break
            yield Segment(plain if options.ascii_only else mark, Style(color=colour))
            yield Segment(words, Style(dim=True))
            room -= len(words) + 1
        yield Segment(" " * room)


# Elsewhere


class Lines:
    """Prints a plain line for each evaluation, and at least every `LINE_SECONDS`."""

    def __init__(self, watch: Watch, say: Callable[[str], None]) -> None:
        self._watch = watch
        self._say = say
        self._told = (-1, watch.held_out)
        self._at = time.monotonic()

    def tell(self, *, at_once: bool = False) -> None:
        """Print a line if there is something new and it is due."""
        watch, now = self._watch, time.monotonic()
        news = (watch.steps_done, watch.held_out)
        is_time = at_once or news[1] != self._told[1] or now - self._at > LINE_SECONDS
        if watch.recent and is_time and news != self._told:
            self._told, self._at = news, now
            self._say(line(watch))


def line(watch: Watch) -> str:
    """Return one line on the progress of the run."""
    ranks = watch.by_rank()
    slow = straggler(ranks)
    words = [f"step {watch.steps_done}/{watch.settings.steps}"]
    if watch.loss is not None:
        words.append(f"loss {watch.loss:.4f}")
    if watch.held_out is not None:
        words.append(f"held out {watch.held_out[1]:.4f}")
    of_step = {name: statistics.fmean(getattr(each, f"{name}_ms") for each in ranks.values()) for name in NAMES}
    parts = ", ".join(f"{name} {digits(of_step[name])}" for name in NAMES[1:])
    words.append(f"{digits(of_step['step'])} ms a step ({parts})")
    words.append(f"{readable_bytes(sum(each.bytes_per_second for each in ranks.values()))}/s sent")
    words += [] if slow is None else [f"slowest rank {slow}"]
    words += [f"{left} left"] if (left := watch.time_left()) else []
    return "  ".join(words)


NAMES = ("step", "compute", "hidden", "waited")


@contextlib.contextmanager
def showing(settings: TrainSettings, folder: Path, start: int) -> Iterator[Watch]:
    """Show the run whose ranks write to `folder` while the block runs."""
    console = Console(stderr=True)
    watch = Watch(folder, settings, start)

    def current() -> RenderableType:
        watch.poll()
        return view(watch)

    with contextlib.closing(watch):
        if console.is_interactive:  # a terminal that can be redrawn
            with Live(get_renderable=current, console=console, refresh_per_second=PER_SECOND):
                yield watch
            return
        lines = Lines(watch, lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True))

        def tell() -> None:
            watch.poll()
            lines.tell()

        try:
            with repeating(tell, 2 / PER_SECOND):
                yield watch
        finally:
            lines.tell(at_once=True)
