"""Plots of a run as inline SVG. Colours are the page's CSS variables, so that plots follow light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

INK = "var(--ink-soft)"
GRID = "var(--line)"
ACCENT = "var(--accent)"
BEFORE = "var(--before)"
RUNS = tuple(f"var(--run-{number})" for number in range(8))
"""Colours of runs that are compared. With more runs they are used again, with dashed lines."""
WIDTH = 317
HEIGHT = 173
"""Size in SVG units. About the width of a phone, so that text keeps its size there."""
LEFT = 36.0
TOP = 2.0
RIGHT = 312.0
BOTTOM = 140.0
"""Edges of the area in which values are drawn; the same in all plots, so that they align."""
FONT_SIZE = 9
MIN_SMOOTHED_POINTS = 40
"""From here a noisy curve also gets a running mean."""
MAX_TICKS_X = 6
MAX_TICKS_Y = 5


@dataclass(frozen=True)
class Curve:
    """A quantity over time: page title, points and number format."""

    title: str
    note: str
    steps: Sequence[float]
    values: Sequence[float]
    write: Callable[[float], str]
    from_zero: bool = False
    noisy: bool = False
    """True if single values are noisy, so that a running mean is shown."""


def curve_svg(curve: Curve) -> str:
    """Return a line plot over the steps."""
    if curve.noisy and len(curve.steps) >= MIN_SMOOTHED_POINTS:
        lines = [
            _Line(curve.steps, curve.values, ACCENT, width=1.0, opacity=0.3),
            _Line(curve.steps, _running_mean(curve.values), ACCENT),
        ]
    else:
        lines = [_Line(curve.steps, curve.values, ACCENT)]
    lines.append(_Line(curve.steps[-1:], curve.values[-1:], ACCENT, dot=2.2))
    plot = _Plot(
        lines, "step", curve.write, x_from_zero=True, y_from_zero=curve.from_zero
    )
    return plot.svg(f"{curve.title} over the steps")


def dims_svg(
    dims: Sequence[int],
    before: Sequence[float] | None,
    after: Sequence[float],
    label: str,
) -> str:
    """Return a plot of a metric by Matryoshka dimension, before and after. Dimensions are evenly spaced: each is
    about half of the next."""
    series = [("after", after, ACCENT)]
    if before is not None:
        series.insert(0, ("before", before, BEFORE))
    xs = range(len(dims))
    lines = [_Line(xs, values, colour, dot=2.2) for _, values, colour in series]
    plot = _Plot(lines, "dimensions kept", "{:.2f}".format, margin_x=0.1, margin_y=0.22)
    plot.ticks_x = [(float(x), str(dim)) for x, dim in enumerate(dims)]
    highest = max(values[0] for _, values, _ in series)
    plot.notes = [
        (0.0, values[0], name, colour, values[0] == highest)
        for name, values, colour in series
    ]
    return plot.svg(f"{label} by number of dimensions")


def stored_svg(
    points: Mapping[str, Sequence[tuple[int, int, float]]], label: str
) -> str:
    """Return a plot of a metric by bytes per document, a line for each stored form of (size, bytes, value). Each tick
    is twice the one before."""
    colours = {"float32": INK, "int8": BEFORE}
    lines = []
    notes = []
    sizes: set[int] = set()
    for form, rows in points.items():
        colour = colours.get(form, ACCENT)
        is_dashed = form == "binary"
        sizes |= {size for _, size, _ in rows}
        xs = [math.log2(size) for _, size, _ in rows]
        values = [value for _, _, value in rows]
        lines.append(_Line(xs, values, colour, is_dashed=is_dashed, dot=2.0))
        if rows:
            name = form.replace("_", ", ")
            notes.append((xs[-1], values[-1], name, colour, not is_dashed))
    plot = _Plot(
        lines,
        "bytes per document",
        "{:.2f}".format,
        margin_x=0.12,
        margin_y=0.22,
        notes=notes,
    )
    for size in sorted(sizes):
        x = math.log2(size)
        if x.is_integer():
            plot.ticks_x.append((x, f"{size:,d}"))
    return plot.svg(f"{label} by bytes per document")


def evaluations_svg(
    steps: Sequence[int], values: Sequence[float], label: str, final_step: int | None
) -> str:
    """Return a plot of the deciding metric over the evaluations. A ring marks the weights that were kept."""
    lines = [_Line(steps, values, ACCENT, dot=2.0)]
    if final_step is not None and final_step in steps:
        value = values[list(steps).index(final_step)]
        lines.append(_Line([final_step], [value], ACCENT, dot=5.0, is_ring=True))
    plot = _Plot(lines, "step", "{:.3f}".format, margin_x=0.06, margin_y=0.2)
    return plot.svg(f"{label} over the steps")


def sweep_svg(
    places: Sequence[float], values: Sequence[float], x_label: str, best: int
) -> str:
    """Return a plot of a score along a line between two models. A ring marks the best point."""
    ring = _Line([places[best]], [values[best]], ACCENT, dot=5.0, is_ring=True)
    note = (places[best], values[best], f"{values[best]:.4f}", ACCENT, True)
    lines = [_Line(places, values, ACCENT, dot=2.0), ring]
    plot = _Plot(
        lines,
        x_label,
        "{:.3f}".format,
        margin_x=0.06,
        margin_y=0.25,
        write_x="{:g}".format,
        notes=[note],
    )
    return plot.svg("score along the line")


def front_svg(
    points: Sequence[tuple[float, float]],
    front: Sequence[int],
    start: tuple[float, float],
    x_label: str,
) -> str:
    """Return a plot of trials with two figures each, and the line through those that no other one beats in both.
    `start`: the model before."""
    ordered = sorted(points[place] for place in front)
    lines = [
        *(_Line([x], [y], BEFORE, dot=2.0) for x, y in points),
        _Line([x for x, _ in ordered], [y for _, y in ordered], ACCENT, dot=2.5),
        _Line([start[0]], [start[1]], INK, dot=3.0),
    ]
    notes = [(*start, "before", INK, True)]
    plot = _Plot(
        lines,
        x_label,
        "{:.3f}".format,
        margin_x=0.1,
        margin_y=0.2,
        write_x="{:g}".format,
        notes=notes,
    )
    return plot.svg("trials, and those that no other one beats")


def bars_svg(values: Mapping[str, float], x_label: str) -> str:
    """Return a horizontal bar for each value, the first one on top."""
    row = 18.0
    largest = max(max(values.values(), default=0.0), 1e-9)
    # A letter is about 0.58 of the font size wide.
    start = 8 + 0.58 * FONT_SIZE * max(map(len, values), default=0)
    parts = []
    for number, (name, value) in enumerate(values.items()):
        top = number * row + 2
        length = value / largest * (0.9 * WIDTH - start)
        parts.append(
            f'<rect x="{start:.1f}" y="{top:.1f}" width="{length:.1f}" height="{row - 6:g}" fill="{ACCENT}"/>'
        )
        parts.append(_text(start - 5, top + 9, name, INK, "end"))
        parts.append(_text(start + length + 4, top + 9, f"{value:.0%}", INK, "start"))
    height = row * len(values) + 20
    parts.append(_text((start + WIDTH) / 2, height - 6, x_label, INK, "middle"))
    return "\n".join([_beginning(WIDTH, height, x_label), *parts, "</svg>"])


@dataclass(frozen=True)
class Line:
    """Curve of one of several runs, and the run's number."""

    run: int
    steps: Sequence[float]
    values: Sequence[float]


def runs_svg(
    lines: Sequence[Line],
    label: str,
    write: Callable[[float], str],
    *,
    has_points: bool = False,
) -> str:
    """Return a plot of one quantity of several runs. `has_points`: mark every value, where they are few; otherwise long
    curves are drawn as their running mean."""
    drawn = []
    for line in lines:
        colour = RUNS[line.run % len(RUNS)]
        is_dashed = line.run >= len(RUNS)
        values = line.values
        if not has_points and len(values) >= MIN_SMOOTHED_POINTS:
            drawn.append(_Line(line.steps, values, colour, width=0.8, opacity=0.2))
            values = _running_mean(values)
        drawn.append(
            _Line(
                line.steps,
                values,
                colour,
                is_dashed=is_dashed,
                dot=2.0 if has_points else 0.0,
            )
        )
        drawn.append(_Line(line.steps[-1:], line.values[-1:], colour, dot=2.2))
    return _Plot(drawn, "step", write, x_from_zero=True).svg(
        f"{label} of several runs over the steps"
    )


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours on both sides, with fewer neighbours at the ends."""
    reach = max(len(values) // MIN_SMOOTHED_POINTS, 2)
    means = []
    for number in range(len(values)):
        window = values[max(number - reach, 0) : number + reach + 1]
        means.append(sum(window) / len(window))
    return means


@dataclass(frozen=True)
class _Line:
    """Points joined by a line, or marked by dots of a radius, or both. A value that is not finite leaves a gap."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    width: float = 1.8
    opacity: float = 1.0
    is_dashed: bool = False
    dot: float = 0.0
    is_ring: bool = False

    def points(self) -> Iterator[tuple[float, float]]:
        """Yield the points that can be drawn."""
        return (
            (x, y)
            for x, y in zip(self.xs, self.ys, strict=True)
            if math.isfinite(x) and math.isfinite(y)
        )


@dataclass
class _Plot:
    """Lines over a grid, with numbers at the axes."""

    lines: Sequence[_Line]
    x_label: str
    write: Callable[[float], str]
    """Format of the numbers at the vertical axis."""
    x_from_zero: bool = False
    y_from_zero: bool = False
    margin_x: float = 0.03
    margin_y: float = 0.15
    ticks_x: list[tuple[float, str]] = field(default_factory=list)
    """Places and their names; without any, round numbers."""
    write_x: Callable[[float], str] | None = None
    """Format of the numbers at the horizontal axis; without it, whole numbers."""
    notes: Sequence[tuple[float, float, str, str, bool]] = ()
    """Texts beside points: x, y, text, colour, and whether it stands above."""

    def svg(self, description: str) -> str:
        """Return the plot for inlining, without fonts or size of its own."""
        points = [point for line in self.lines for point in line.points()]
        xs = [x for x, _ in points] or [0.0]
        ys = [y for _, y in points] or [0.0]
        self.x = _Scale.over(xs, self.margin_x, LEFT, RIGHT, from_zero=self.x_from_zero)
        self.y = _Scale.over(ys, self.margin_y, BOTTOM, TOP, from_zero=self.y_from_zero)
        parts = list(self._grid())
        for line in self.lines:
            parts += self._drawn(line)
        for x, y, text, colour, is_above in self.notes:
            offset = -8.0 if is_above else 8.0 + 0.7 * FONT_SIZE
            parts.append(
                _text(self.x.at(x), self.y.at(y) + offset, text, colour, "middle")
            )
        return "\n".join([_beginning(WIDTH, HEIGHT, description), *parts, "</svg>"])

    def _grid(self) -> Iterator[str]:
        for value in self.y.ticks(MAX_TICKS_Y):
            y = self.y.at(value)
            yield f'<path d="M{LEFT:g} {y:.1f}H{RIGHT:g}" fill="none" stroke="{GRID}" stroke-width="0.8"/>'
            yield _text(LEFT - 4, y + 0.35 * FONT_SIZE, self.write(value), INK, "end")
        yield f'<path d="M{LEFT:g} {BOTTOM:g}H{RIGHT:g}" fill="none" stroke="{GRID}" stroke-width="0.8"/>'
        write = self.write_x or "{:,.0f}".format
        smallest = 0.0 if self.write_x else 1.0
        ticks = self.ticks_x
        if not ticks:
            values = self.x.ticks(MAX_TICKS_X, smallest)
            ticks = [(value, write(value)) for value in values]
        for value, name in ticks:
            yield _text(self.x.at(value), BOTTOM + 13, name, INK, "middle")
        yield _text((LEFT + RIGHT) / 2, BOTTOM + 27, self.x_label, INK, "middle")

    def _drawn(self, line: _Line) -> Iterator[str]:
        path = ""
        command = "M"
        for x, y in zip(line.xs, line.ys, strict=True):
            if math.isfinite(x) and math.isfinite(y):
                path += f"{command}{self.x.at(x):.1f} {self.y.at(y):.1f}"
                command = "L"
            else:
                # A gap lifts the pen: the next point begins a line.
                command = "M"
        look = f'stroke="{line.colour}" stroke-width="{line.width:g}" stroke-linecap="round"'
        look += f' opacity="{line.opacity:g}"' if line.opacity < 1 else ""
        look += ' stroke-dasharray="6 3"' if line.is_dashed else ""
        if "L" in path:
            yield f'<path d="{path}" fill="none" {look}/>'
        if not line.dot:
            return
        fill = f'fill="{line.colour}"'
        if line.is_ring:
            fill = f'fill="none" stroke="{line.colour}"'
        for x, y in line.points():
            yield f'<circle cx="{self.x.at(x):.1f}" cy="{self.y.at(y):.1f}" r="{line.dot:g}" {fill}/>'


@dataclass(frozen=True)
class _Scale:
    """Linear map from values to the places between two edges."""

    low: float
    high: float
    start: float
    stop: float

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        margin: float,
        start: float,
        stop: float,
        *,
        from_zero: bool = False,
    ) -> _Scale:
        """Return the scale that shows all values, with a margin in parts of their range."""
        low = min(values)
        high = max(values)
        # A single value stands in the middle of a range of its own size.
        rest = margin * (high - low) if high > low else 0.05 * abs(high) or 0.05
        top = high + rest
        return cls(0.0 if from_zero and top > 0 else low - rest, top, start, stop)

    def at(self, value: float) -> float:
        """Return the place of a value."""
        fraction = (value - self.low) / (self.high - self.low)
        return self.start + fraction * (self.stop - self.start)

    def ticks(self, at_most: int, smallest: float = 0.0) -> list[float]:
        """Return round values of the range: multiples of 1, 2, 2.5 or 5 times a power of ten, `smallest` or more."""
        least = max((self.high - self.low) / at_most, smallest)
        power = 10.0 ** math.floor(math.log10(least))
        # The tolerance keeps a step that is the wanted one but for rounding.
        for factor in (1, 2, 2.5, 5, 10):
            step = factor * power
            # With `smallest` 1 (steps of a run) 2.5 is no step.
            is_allowed = not smallest or step % smallest == 0
            if is_allowed and step >= least * (1 - 1e-9):
                break
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def _beginning(width: float, height: float, description: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(description)}">'


def _text(x: float, y: float, text: str, colour: str, anchor: str) -> str:
    look = f'font-size="{FONT_SIZE}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
