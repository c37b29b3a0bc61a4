"""Plots of runs: SVG for a page, in its CSS variables so that plots follow light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

INK = "var(--ink-soft)"
GRID_COLOUR = "var(--line)"
ACCENT = "var(--accent)"
BEFORE = "var(--before)"
RUN_COLOURS = tuple(f"var(--run-{number})" for number in range(8))
"""Colours of runs that are compared. With more runs they are used again."""
WIDTH = 317.0
HEIGHT = 173.0
"""Size in SVG units. About the width of a phone, so that text keeps its size there."""
LEFT = 36.0
TOP = 2.0
RIGHT = 312.0
BOTTOM = 140.0
"""Edges of the area in which values are drawn; the same in all plots, so that they align."""
FONT_SIZE = 9
MAX_TICKS_X = 6
MAX_TICKS_Y = 5

Point = tuple[float, float]


# ---- marks, which plot.html.j2 writes as SVG -------------------------------------------------------------------------


@dataclass(frozen=True)
class Stroke:
    """A line through points."""

    points: Sequence[Point]
    colour: str
    width: float = 1.8


@dataclass(frozen=True)
class Dot:
    """A filled circle, or a ring."""

    x: float
    y: float
    radius: float
    colour: str
    is_ring: bool = False


@dataclass(frozen=True)
class Text:
    """A line of text, by its baseline."""

    x: float
    y: float
    text: str
    colour: str = INK
    anchor: str = "middle"


Mark = Stroke | Dot | Text


@dataclass(frozen=True)
class Plot:
    """Marks on an area of WIDTH x HEIGHT."""

    description: str
    marks: Sequence[Mark]
    width: ClassVar[float] = WIDTH
    height: ClassVar[float] = HEIGHT
    font_size: ClassVar[int] = FONT_SIZE


# ---- the plots -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A quantity over time: page title, points and number format."""

    title: str
    note: str
    steps: Sequence[float]
    values: Sequence[float]
    write: Callable[[float], str]
    from_zero: bool = False
    has_points: bool = False
    """Every value is marked, where they are few."""


def plot_curves(
    curves: Sequence[tuple[str, Curve]],
    ring_at: float | None = None,
) -> Plot:
    """Return a plot of one quantity over the steps, of one run or several, each in its colour. `ring_at`: the step whose
    value gets a ring."""
    lines = []
    for colour, curve in curves:
        dot = 2.0 if curve.has_points else 0.0
        lines.append(_Line(curve.steps, curve.values, colour, dot))
        lines.append(_Line(curve.steps[-1:], curve.values[-1:], colour, dot=2.2))
        if ring_at is not None and ring_at in curve.steps:
            place = list(curve.steps).index(ring_at)
            value = curve.values[place]
            ring = _Line([ring_at], [value], colour, dot=5.0, is_ring=True)
            lines.append(ring)
    title = f"{curve.title} over the steps"
    return _plot(
        title,
        lines,
        curve.write,
        y_from_zero=curve.from_zero,
    )


def plot_stored(points: Mapping[str, Sequence[tuple[int, int, float]]]) -> Plot:
    """Return a plot of nDCG@10 by bytes per document, a line for each stored form of (size, bytes, value). Ticks are
    powers of two."""
    colours = {"float32": INK, "int8": BEFORE}
    lines = []
    notes = []
    all_xs = []
    for form, rows in points.items():
        if not rows:
            continue
        colour = colours.get(form, ACCENT)
        xs = [math.log2(size) for _, size, _ in rows]
        values = [value for _, _, value in rows]
        lines.append(_Line(xs, values, colour, dot=2.0))
        name = form.replace("_", ", ")
        notes.append((xs[-1], values[-1], name, colour, form != "binary"))
        all_xs += xs
    powers = range(math.ceil(min(all_xs)), math.floor(max(all_xs)) + 1)
    return _plot(
        "nDCG@10 by bytes per document",
        lines,
        "{:.2f}".format,
        "bytes per document",
        ticks_x=[(power, f"{2**power:,d}") for power in powers],
        notes=notes,
    )


# ---- axes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """Points joined by a line, or marked by dots of a radius, or both."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    dot: float = 0.0
    is_ring: bool = False


def _plot(
    description: str,
    lines: Sequence[_Line],
    write: Callable[[float], str],
    x_label: str | None = None,
    *,
    y_from_zero: bool = False,
    ticks_x: Sequence[tuple[float, str]] = (),
    notes: Sequence[tuple[float, float, str, str, bool]] = (),
) -> Plot:
    """Return lines over a grid, with numbers at the axes.

    `write`: format of the numbers at the vertical axis. `x_label`: None for the steps of a run, which are whole numbers
    from zero. `ticks_x`: places at another horizontal axis and their names. `notes`: x, y, text,
    colour of texts beside points, and whether they stand above.
    """
    xs: list[float] = []
    ys: list[float] = []
    for line in lines:
        xs += line.xs
        ys += line.ys
    is_over_steps = x_label is None
    # Texts beside points need space at the edges.
    margin_x = 0.03 if is_over_steps else 0.1
    margin_y = 0.15 if is_over_steps else 0.22
    scale_x = _Scale(
        xs,
        margin_x,
        LEFT,
        RIGHT,
        from_zero=is_over_steps,
    )
    scale_y = _Scale(
        ys,
        margin_y,
        BOTTOM,
        TOP,
        from_zero=y_from_zero,
    )
    marks: list[Mark] = []
    for value in scale_y.ticks(MAX_TICKS_Y):
        y = scale_y.at(value)
        marks.append(Stroke([(LEFT, y), (RIGHT, y)], GRID_COLOUR, 0.8))
        marks.append(
            Text(
                LEFT - 4,
                y + 0.35 * FONT_SIZE,
                write(value),
                anchor="end",
            )
        )
    marks.append(Stroke([(LEFT, BOTTOM), (RIGHT, BOTTOM)], GRID_COLOUR, 0.8))
    if is_over_steps:
        steps = scale_x.ticks(MAX_TICKS_X, smallest=1.0)
        ticks_x = [(step, f"{step:,.0f}") for step in steps]
    for value, name in ticks_x:
        marks.append(Text(scale_x.at(value), BOTTOM + 13, name))
    marks.append(Text((LEFT + RIGHT) / 2, BOTTOM + 27, x_label or "step"))
    for line in lines:
        places = []
        for x, y in zip(line.xs, line.ys, strict=True):
            places.append((scale_x.at(x), scale_y.at(y)))
        if len(places) > 1:
            marks.append(Stroke(places, line.colour))
        if line.dot:
            for x, y in places:
                marks.append(Dot(x, y, line.dot, line.colour, line.is_ring))
    for x, y, text, colour, is_above in notes:
        offset = -8.0 if is_above else 8.0 + 0.7 * FONT_SIZE
        marks.append(
            Text(
                scale_x.at(x),
                scale_y.at(y) + offset,
                text,
                colour,
            )
        )
    return Plot(description, marks)


class _Scale:
    """Linear map from values to the places between two edges, with a margin in parts of the values' range."""

    def __init__(
        self,
        values: Sequence[float],
        margin: float,
        start: float,
        stop: float,
        *,
        from_zero: bool,
    ) -> None:
        low = min(values)
        high = max(values)
        # A single value stands in the middle of a range of its own size.
        margin_size = margin * (high - low) if high > low else 0.05 * abs(high) or 0.05
        self._high = high + margin_size
        self._low = 0.0 if from_zero and self._high > 0 else low - margin_size
        self._start = start
        self._stop = stop

    def at(self, value: float) -> float:
        """Return the place of a value."""
        fraction = (value - self._low) / (self._high - self._low)
        return self._start + fraction * (self._stop - self._start)

    def ticks(
        self,
        at_most: int,
        smallest: float = 0.0,
    ) -> list[float]:
        """Return round values of the range: multiples of 1, 2 or 5 times a power of ten, `smallest` or more."""
        least = max((self._high - self._low) / at_most, smallest)
        power = 10.0 ** math.floor(math.log10(least))
        # The tolerance keeps a step that is the wanted one but for rounding.
        for factor in (1, 2, 5, 10):
            step = factor * power
            if step >= least * (1 - 1e-9):
                break
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]
