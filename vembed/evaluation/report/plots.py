"""Plots of runs: SVG for a page, in its CSS variables so that plots follow light and dark mode."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

INK = "var(--ink-soft)"
GRID_COLOUR = "var(--line)"
ACCENT = "var(--accent)"
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
    x_label: str = "step",
    write_x: Callable[[float], str] = "{:,.0f}".format,
) -> Plot:
    """Return a plot of one quantity over the steps or another whole number, of one run or several, each in its colour.
    `ring_at`: the step whose value gets a ring. `write_x`: the text below a step."""
    xs: list[float] = []
    ys: list[float] = []
    for _, curve in curves:
        xs += curve.steps
        ys += curve.values
    scale_x = _Scale(xs, 0.03, LEFT, RIGHT, from_zero=True)
    scale_y = _Scale(ys, 0.15, BOTTOM, TOP, from_zero=curve.from_zero)
    marks: list[Mark] = []
    for value in scale_y.ticks(MAX_TICKS_Y):
        y = scale_y.at(value)
        marks.append(Stroke([(LEFT, y), (RIGHT, y)], GRID_COLOUR, 0.8))
        label = curve.write(value)
        marks.append(Text(LEFT - 4, y + 0.35 * FONT_SIZE, label, anchor="end"))
    marks.append(Stroke([(LEFT, BOTTOM), (RIGHT, BOTTOM)], GRID_COLOUR, 0.8))
    for step in scale_x.ticks(MAX_TICKS_X, smallest=1.0):
        marks.append(Text(scale_x.at(step), BOTTOM + 13, write_x(step)))
    marks.append(Text((LEFT + RIGHT) / 2, BOTTOM + 27, x_label))
    for colour, curve in curves:
        points = []
        for step, value in zip(curve.steps, curve.values, strict=True):
            points.append((scale_x.at(step), scale_y.at(value)))
        if len(points) > 1:
            marks.append(Stroke(points, colour))
        for x, y in points if curve.has_points else points[-1:]:
            marks.append(Dot(x, y, 2.2, colour))
        if ring_at is not None and ring_at in curve.steps:
            x, y = points[list(curve.steps).index(ring_at)]
            marks.append(Dot(x, y, 5.0, colour, is_ring=True))
    return Plot(f"{curve.title} by {x_label}", marks)


# ---- axes ----------------------------------------------------------------------------------------------------------


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
