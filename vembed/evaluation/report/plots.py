"""Plots of runs: which values stand where. plot.html.j2 writes them as SVG, in the page's CSS variables, so that plots
follow light and dark mode."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ACCENT = "var(--accent)"
RUN_COLOURS = tuple(f"var(--run-{number})" for number in range(8))
"""Colours of runs that are compared. With more runs they are used again."""
MAX_TICKS_X = 6
MAX_TICKS_Y = 5

NumberFormat = Callable[[float], str]
"""Writes a number as text."""
Point = tuple[float, float]
Tick = tuple[float, str]
"""A place on an axis, and its label."""


@dataclass(frozen=True)
class Line:
    """A curve in a plot."""

    colour: str
    points: Sequence[Point]
    dots: Sequence[Point]
    """Points that are marked."""
    ring: Point | None


@dataclass(frozen=True)
class Plot:
    """What is drawn. All places are fractions of the axes, from the origin at the bottom left."""

    description: str
    x_label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[Line]


@dataclass(frozen=True)
class Curve:
    """A quantity over time: page title, points and number format."""

    title: str
    note: str
    steps: Sequence[float]
    values: Sequence[float]
    write: NumberFormat
    from_zero: bool = False
    has_points: bool = False
    """Every value is marked, where they are few."""


def plot_curves(
    curves: Sequence[tuple[str, Curve]],
    ring_at: float | None = None,
    x_label: str = "step",
    write_x: NumberFormat = "{:,.0f}".format,
) -> Plot:
    """Return a plot of one quantity over the steps or another whole number, of one run or several, each in its colour.
    `ring_at`: the step whose value gets a ring. `write_x`: the text below a step."""
    xs: list[float] = []
    ys: list[float] = []
    for _, curve in curves:
        xs += curve.steps
        ys += curve.values
    scale_x = _Scale(xs, 0.03, from_zero=True)
    scale_y = _Scale(ys, 0.15, from_zero=curve.from_zero)
    lines = []
    for colour, curve in curves:
        points = []
        for step, value in zip(curve.steps, curve.values, strict=True):
            points.append((scale_x.at(step), scale_y.at(value)))
        ring = None
        if ring_at is not None and ring_at in curve.steps:
            ring = points[list(curve.steps).index(ring_at)]
        dots = points if curve.has_points else points[-1:]
        lines.append(Line(colour, points, dots, ring))
    return Plot(
        f"{curve.title} by {x_label}",
        x_label,
        scale_x.ticks(MAX_TICKS_X, write_x, smallest=1.0),
        scale_y.ticks(MAX_TICKS_Y, curve.write),
        lines,
    )


# ---- axes ----------------------------------------------------------------------------------------------------------


class _Scale:
    """Linear map from values to fractions of an axis, with a margin in parts of the values' range."""

    def __init__(
        self,
        values: Sequence[float],
        margin: float,
        *,
        from_zero: bool,
    ) -> None:
        low = min(values)
        high = max(values)
        # A single value stands in the middle of a range of its own size.
        margin_size = margin * (high - low) if high > low else 0.05 * abs(high) or 0.05
        self._high = high + margin_size
        self._low = 0.0 if from_zero and self._high > 0 else low - margin_size

    def at(self, value: float) -> float:
        """Return the place of a value."""
        return (value - self._low) / (self._high - self._low)

    def ticks(
        self,
        at_most: int,
        write: NumberFormat,
        smallest: float = 0.0,
    ) -> list[Tick]:
        """Return round values of the range, as `write` writes them: multiples of 1, 2 or 5 times a power of ten,
        `smallest` or more."""
        least = max((self._high - self._low) / at_most, smallest)
        power = 10.0 ** math.floor(math.log10(least))
        # The tolerance keeps a step that is the wanted one but for rounding.
        for factor in (1, 2, 5, 10):
            step = factor * power
            if step >= least * (1 - 1e-9):
                break
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        return [(self.at(value), write(value)) for value in values]
