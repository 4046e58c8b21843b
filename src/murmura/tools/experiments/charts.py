"""Draw line and bar charts as SVG text, without a library or scripts, in the reader's light or dark mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 48
LETTER = 6.6  # the width of one, about
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")

STYLE = """
.chart { font: 12px system-ui, sans-serif; --ink: #1f2328; --faint: #d0d7de; --paper: #ffffff; }
.chart .paper { fill: var(--paper); }
.chart text { fill: var(--ink); stroke: var(--paper); stroke-width: 3px; paint-order: stroke; }
.chart .axis, .chart .grid { stroke: var(--faint); } .chart .curve { fill: none; stroke-width: 1.8; }
.chart .band { opacity: 0.22; }
.chart .rule { stroke: var(--ink); stroke-dasharray: 4 4; opacity: 0.6; }
@media (prefers-color-scheme: dark) { .chart { --ink: #e6edf3; --faint: #3d444d; --paper: #0d1117; } }
"""


@dataclass(frozen=True)
class Line:
    """A named curve; `band` holds (x, low, high) around it."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Axis:
    """One axis of a chart."""

    label: str
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return `value` on the drawn scale; on a logarithmic one values of 0 and below count as tiny."""
        return math.log10(max(value, 1e-12)) if self.logarithmic else value

    def ticks(self, low: float, high: float) -> list[float]:
        """Return a handful of round values between the two."""
        if not self.logarithmic:
            step = _round_step((high - low) / 5)
            first = math.ceil(low / step - 1e-9)
            return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [mark * 10.0**each for each in exponents for mark in (1, 2, 5) if low <= mark * 10.0**each <= high]


@dataclass(frozen=True)
class LineChart:
    """Curves over a common axis, with a legend; `rules` are named horizontal lines. Notebooks display it."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    rules: Sequence[tuple[str, float]] = field(default=())

    def to_svg(self) -> str:
        """Return the chart; a note instead if there are no points."""
        points = [point for line in self.lines for point in line.points if all(map(math.isfinite, point))]
        points += [(x, y) for line in self.lines for x, *ends in line.band for y in ends if math.isfinite(y)]
        if not points:
            return _frame(self.title, [_text(WIDTH / 2, HEIGHT / 2, "nothing to draw", "middle")])
        across = _Scale(self.x, [x for x, _ in points], LEFT, WIDTH - RIGHT)
        up = _Scale(self.y, [y for _, y in points] + [value for _, value in self.rules], HEIGHT - BOTTOM, TOP)
        parts = [*_x_axis(self.x, across), *_y_axis(self.y, up)]
        for name, value in self.rules:
            at = up(value)
            parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(_text(LEFT + 6, at - 4, name, "start"))
        inked: list[tuple[float, float]] = []
        for index, line in enumerate(self.lines):
            colour = COLOURS[index % len(COLOURS)]
            finite = [each for each in line.band if all(map(math.isfinite, each))]
            edge = [(x, high) for x, _, high in finite] + [(x, low) for x, low, _ in reversed(finite)]
            if edge:
                path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in edge)
                parts.append(f'<polygon class="band" fill="{colour}" points="{path}"/>')
            placed = [(across(x), up(y)) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
            inked += [*placed, *_between(placed)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            name = f"<title>{escape(line.name)}</title>"
            parts.append(f'<polyline class="curve" stroke="{colour}" points="{path}">{name}</polyline>')
        parts += _column_of_names([line.name for line in self.lines], inked)
        return _frame(self.title, parts)

    _repr_svg_ = to_svg


@dataclass(frozen=True)
class StackedBars:
    """A horizontal bar for each name, stacked of named parts. Notebooks display it."""

    title: str
    label: str
    parts: Sequence[str]
    bars: Sequence[tuple[str, Sequence[float]]]

    def to_svg(self) -> str:
        """Return the chart; its bars are horizontal so that long names fit."""
        longest = max((sum(values) for _, values in self.bars), default=0.0)
        if not self.bars or longest <= 0:
            return _frame(self.title, [_text(WIDTH / 2, HEIGHT / 2, "nothing to draw", "middle")])
        height = TOP + BOTTOM + 26 * len(self.bars) + 18
        left = 200
        axis = Axis(self.label)
        across = _Scale(axis, [0.0, longest], left, WIDTH - RIGHT)
        drawn = _x_axis(axis, across, left, height)
        for index, (name, values) in enumerate(self.bars):
            at = TOP + 18 + 26 * index
            drawn.append(_text(left - 8, at + 14, name, "end"))
            begin = 0.0
            for part, (what, value) in enumerate(zip(self.parts, values, strict=True)):
                x, width = across(begin), across(begin + value) - across(begin)
                drawn.append(
                    f'<rect x="{x:.1f}" y="{at}" width="{max(width, 0):.1f}" height="18" fill="{COLOURS[part]}">'
                    f"<title>{escape(what)}: {value:.3g}</title></rect>"
                )
                begin += value
        drawn += _row_of_names(self.parts, left, TOP + 6)
        return _frame(self.title, drawn, height)

    _repr_svg_ = to_svg


class _Scale:
    """From values to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], begin: float, end: float) -> None:
        self._axis = axis
        known = [value for value in values if value > 0 or not axis.logarithmic] or [1.0]
        self.low, self.high = min(known), max(known)
        if self.low == self.high:
            self.low, self.high = (self.low / 2, self.high * 2) if axis.logarithmic else (self.low - 1, self.high + 1)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        low, high = self._axis.place(self.low), self._axis.place(self.high)
        share = (self._axis.place(value) - low) / (high - low)
        return self._begin + min(1.0, max(0.0, share)) * (self._end - self._begin)


def _x_axis(axis: Axis, scale: _Scale, left: float = LEFT, height: float = HEIGHT) -> list[str]:
    bottom = height - BOTTOM
    parts = [f'<line class="axis" x1="{left}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    parts += [_text(scale(tick), bottom + 18, _number(tick), "middle") for tick in axis.ticks(scale.low, scale.high)]
    return [*parts, _text((left + WIDTH - RIGHT) / 2, height - 10, axis.label, "middle")]


def _y_axis(axis: Axis, scale: _Scale) -> list[str]:
    parts = []
    for tick in axis.ticks(scale.low, scale.high):
        at = scale(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 6, at + 4, _number(tick), "end"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    label = f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
    return [*parts, f"{label}{escape(axis.label)}</text>"]


def _between(placed: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points on the line through those given."""
    return [
        (x + share * (next_x - x), y + share * (next_y - y))
        for (x, y), (next_x, next_y) in itertools.pairwise(placed)
        for share in (0.25, 0.5, 0.75)
    ]


def _column_of_names(names: Sequence[str], inked: Sequence[tuple[float, float]]) -> list[str]:
    """Return a legend in the corner where it covers the fewest points, preferably the top right."""
    width, height = 24 + LETTER * max(map(len, names), default=0), 16 * len(names)
    corners = [(x, y) for y in (TOP + 8, HEIGHT - BOTTOM - height) for x in (WIDTH - RIGHT - width, LEFT + 12)]

    def num_covered(corner: tuple[float, float]) -> int:
        left, top = corner
        return sum(left - 12 < x < left + width and top - 12 < y < top + height for x, y in inked)

    x, top = min(corners, key=num_covered)
    return [part for index, name in enumerate(names) for part in _key(index, name, x, top + 16 * index)]


def _row_of_names(names: Sequence[str], x: float, y: float) -> list[str]:
    """A legend that begins at `x`."""
    parts = []
    for index, name in enumerate(names):
        parts += _key(index, name, x, y)
        x += 36 + LETTER * len(name)
    return parts


def _key(index: int, name: str, x: float, y: float) -> list[str]:
    box = f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>'
    return [box, _text(x + 18, y + 1, name, "start")]


def _frame(title: str, parts: Sequence[str], height: float = HEIGHT) -> str:
    return "\n".join(
        [
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
            f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-weight="600">{escape(title)}</text>',
            *parts,
            "</svg>",
        ]
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _number(value: float) -> str:
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:.6g}"


def _round_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, close to `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(mark * power for mark in (1, 2, 5, 10) if mark * power >= rough * 0.999)
