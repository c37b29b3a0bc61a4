"""Plots of runs: SVG for a page, in its CSS variables so that plots follow light and dark mode, or .svg and .png files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image, ImageColor, ImageDraw, ImageFont

INK = "var(--ink-soft)"
GRID_COLOUR = "var(--line)"
ACCENT = "var(--accent)"
BEFORE = "var(--before)"
COLOURS = {INK: "#666c75", GRID_COLOUR: "#e4e5e2", ACCENT: "#1f5fbf", BEFORE: "#a3a8ae"}
"""Colours of the page in daylight, for files."""
TITLE_COLOUR = "#1b1d20"
RUN_COLOURS = tuple(f"var(--run-{number})" for number in range(8))
"""Colours of runs that are compared. With more runs they are used again, paler."""
WIDTH = 317.0
HEIGHT = 173.0
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
PLOT_MARGIN = 5.0
TITLE_HEIGHT = 16.0
"""Margin of a file, and what its title takes above the plot."""
PIXEL_OVERSAMPLING = 2
PIXELS_PER_UNIT = 3 * PIXEL_OVERSAMPLING
"""A PNG is drawn on a grid that is finer by PIXEL_OVERSAMPLING, which makes its lines smooth."""
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
"""SVG's text-anchor -> Pillow's: left, middle or right, on the baseline."""

Point = tuple[float, float]


# ---- marks: each as SVG, and drawn by Pillow -----------------------------------------------------------------------


@dataclass(frozen=True)
class Stroke:
    """A line through points. A thick one is a bar."""

    points: Sequence[Point]
    colour: str
    width: float = 1.8
    opacity: float = 1.0

    def svg(self) -> str:
        """Return the SVG element."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in self.points)
        look = f'stroke="{self.colour}" stroke-width="{self.width:g}" opacity="{self.opacity:g}"'
        return f'<path d="M{path}" fill="none" {look}/>'

    def draw(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw it, mixed with the white below it where it is not opaque."""
        channels = ImageColor.getrgb(COLOURS[self.colour])
        mixed = [round(255 + (channel - 255) * self.opacity) for channel in channels]
        width = round(self.width * PIXELS_PER_UNIT)
        pixels = [_pixel(x, y) for x, y in self.points]
        draw.line(pixels, tuple(mixed), width, joint="curve")


@dataclass(frozen=True)
class Dot:
    """A filled circle, or a ring."""

    x: float
    y: float
    radius: float
    colour: str
    is_ring: bool = False

    def svg(self) -> str:
        """Return the SVG element."""
        place = f'cx="{self.x:.1f}" cy="{self.y:.1f}" r="{self.radius:g}"'
        look = f'fill="{self.colour}"'
        if self.is_ring:
            look = f'fill="none" stroke="{self.colour}"'
        return f"<circle {place} {look}/>"

    def draw(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw it."""
        colour = COLOURS[self.colour]
        start = _pixel(self.x - self.radius, self.y - self.radius)
        end = _pixel(self.x + self.radius, self.y + self.radius)
        fill = None if self.is_ring else colour
        draw.ellipse((*start, *end), fill, colour, PIXELS_PER_UNIT)


@dataclass(frozen=True)
class Text:
    """A line of text, by its baseline."""

    x: float
    y: float
    text: str
    colour: str = INK
    anchor: str = "middle"
    size: int = FONT_SIZE

    def svg(self) -> str:
        """Return the SVG element."""
        place = f'x="{self.x:.1f}" y="{self.y:.1f}" text-anchor="{self.anchor}"'
        look = f'font-size="{self.size}" fill="{self.colour}"'
        return f"<text {place} {look}>{escape(self.text)}</text>"

    def draw(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw it."""
        font = ImageFont.load_default(self.size * PIXELS_PER_UNIT)
        colour = COLOURS.get(self.colour, self.colour)
        anchor = ANCHORS[self.anchor]
        draw.text(_pixel(self.x, self.y), self.text, colour, font, anchor)


Mark = Stroke | Dot | Text


def _pixel(x: float, y: float) -> Point:
    """Return the place of a point in the image of a file."""
    top = TITLE_HEIGHT + PLOT_MARGIN
    return (x + PLOT_MARGIN) * PIXELS_PER_UNIT, (y + top) * PIXELS_PER_UNIT


@dataclass(frozen=True)
class Plot:
    """Marks on an area of WIDTH x `height`."""

    description: str
    marks: Sequence[Mark]
    height: float = HEIGHT

    def __html__(self) -> str:
        """Return the SVG for a page, whose fonts and width it takes. Templates call this."""
        start = f'<svg viewBox="0 0 {WIDTH:g} {self.height:g}" role="img" aria-label="{escape(self.description)}">'
        return "\n".join([start, *(mark.svg() for mark in self.marks), "</svg>"])

    def image(self, title: str) -> Image.Image:
        """Draw the plot below a title."""
        width, height = _pixel(WIDTH + PLOT_MARGIN, self.height + PLOT_MARGIN)
        image = Image.new("RGB", (round(width), round(height)), "white")
        draw = ImageDraw.Draw(image)
        for mark in (*self.marks, _title(title)):
            mark.draw(draw)
        return image.reduce(PIXEL_OVERSAMPLING)

    def write(self, path: Path, title: str = "") -> Path:
        """Write a file of its own, .svg or .png by the path's suffix."""
        if path.suffix == ".png":
            self.image(title).save(path)
            return path
        width = WIDTH + 2 * PLOT_MARGIN
        height = self.height + TITLE_HEIGHT + 2 * PLOT_MARGIN
        top = -TITLE_HEIGHT - PLOT_MARGIN
        look = f'viewBox="{-PLOT_MARGIN:g} {top:g} {width:g} {height:g}" width="{2 * width:g}" font-family="sans-serif"'
        lines = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" {look}>',
            f'<rect x="{-PLOT_MARGIN:g}" y="{top:g}" width="{width:g}" height="{height:g}" fill="#ffffff"/>',
            *(mark.svg() for mark in (*self.marks, _title(title))),
            "</svg>\n",
        ]
        text = "\n".join(lines)
        for variable, colour in COLOURS.items():
            text = text.replace(variable, colour)
        path.write_text(text, encoding="utf-8")
        return path


def _title(title: str) -> Text:
    return Text(0.0, -8.0, title, TITLE_COLOUR, "start", FONT_SIZE + 1)


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
    noisy: bool = False
    """True if single values are noisy, so that a running mean is shown."""


def plot_curve(curve: Curve) -> Plot:
    """Return a line plot over the steps."""
    values = curve.values
    lines = []
    if curve.noisy and len(values) >= MIN_SMOOTHED_POINTS:
        lines.append(_Line(curve.steps, values, ACCENT, width=1.0, opacity=0.3))
        values = _running_mean(values)
    lines.append(_Line(curve.steps, values, ACCENT))
    lines.append(_Line(curve.steps[-1:], curve.values[-1:], ACCENT, dot=2.2))
    title = f"{curve.title} over the steps"
    return _plot(title, lines, curve.write, y_from_zero=curve.from_zero)


def plot_runs(curves: Sequence[tuple[int, Curve]], *, has_points: bool = False) -> Plot:
    """Return a plot of one quantity of several runs, each with its number. `has_points`: mark every value, where they
    are few; otherwise long curves are drawn as their running mean."""
    dot = 2.0 if has_points else 0.0
    lines = []
    for run, curve in curves:
        colour = RUN_COLOURS[run % len(RUN_COLOURS)]
        opacity = 1.0 if run < len(RUN_COLOURS) else 0.5
        values = curve.values
        if not has_points and len(values) >= MIN_SMOOTHED_POINTS:
            lines.append(_Line(curve.steps, values, colour, width=0.8, opacity=0.2))
            values = _running_mean(values)
        lines.append(_Line(curve.steps, values, colour, opacity=opacity, dot=dot))
        lines.append(_Line(curve.steps[-1:], values[-1:], colour, dot=2.2))
    first = curves[0][1]
    title = f"{first.title} of several runs over the steps"
    return _plot(title, lines, first.write)


def plot_evaluations(
    steps: Sequence[int],
    values: Sequence[float],
    label: str,
    final_step: int | None,
) -> Plot:
    """Return a plot of the deciding metric over the evaluations. A ring marks the weights that were kept."""
    lines = [_Line(steps, values, ACCENT, dot=2.0)]
    if final_step is not None and final_step in steps:
        value = values[list(steps).index(final_step)]
        lines.append(_Line([final_step], [value], ACCENT, dot=5.0, is_ring=True))
    return _plot(f"{label} over the steps", lines, "{:.3f}".format)


def plot_dims(
    dims: Sequence[int],
    before: Sequence[float] | None,
    after: Sequence[float],
    label: str,
) -> Plot:
    """Return a plot of a metric by Matryoshka dimension, before and after. Dimensions are evenly spaced: each is
    about half of the next."""
    series = [("after", after, ACCENT)]
    if before is not None:
        series.insert(0, ("before", before, BEFORE))
    highest = max(values[0] for _, values, _ in series)
    lines = []
    notes = []
    for name, values, colour in series:
        lines.append(_Line(range(len(dims)), values, colour, dot=2.2))
        notes.append((0.0, values[0], name, colour, values[0] == highest))
    return _plot(
        f"{label} by number of dimensions",
        lines,
        "{:.2f}".format,
        "dimensions kept",
        ticks_x=[(x, str(dim)) for x, dim in enumerate(dims)],
        notes=notes,
    )


def plot_stored(
    points: Mapping[str, Sequence[tuple[int, int, float]]], label: str
) -> Plot:
    """Return a plot of a metric by bytes per document, a line for each stored form of (size, bytes, value). Ticks are
    powers of two."""
    colours = {"float32": INK, "int8": BEFORE}
    lines = []
    notes = []
    all_xs = []
    for form, rows in points.items():
        if not rows:
            continue
        colour = colours.get(form, ACCENT)
        is_rescored = form != "binary"
        xs = [math.log2(size) for _, size, _ in rows]
        values = [value for _, _, value in rows]
        opacity = 1.0 if is_rescored else 0.5
        lines.append(_Line(xs, values, colour, opacity=opacity, dot=2.0))
        name = form.replace("_", ", ")
        notes.append((xs[-1], values[-1], name, colour, is_rescored))
        all_xs += xs
    powers = range(math.ceil(min(all_xs)), math.floor(max(all_xs)) + 1)
    return _plot(
        f"{label} by bytes per document",
        lines,
        "{:.2f}".format,
        "bytes per document",
        ticks_x=[(power, f"{2**power:,d}") for power in powers],
        notes=notes,
    )


def plot_bars(values: Mapping[str, float], x_label: str) -> Plot:
    """Return a horizontal bar for each value, the first one on top."""
    row = 18.0
    largest = max(values.values())
    # A letter is about 0.58 of the font size wide.
    start = 8 + 0.58 * FONT_SIZE * max(map(len, values))
    marks: list[Mark] = []
    for number, (name, value) in enumerate(values.items()):
        middle = number * row + 8
        end = start + value / max(largest, 1e-9) * (0.9 * WIDTH - start)
        marks.append(Stroke([(start, middle), (end, middle)], ACCENT, row - 6))
        marks.append(Text(start - 5, middle + 3, name, anchor="end"))
        marks.append(Text(end + 4, middle + 3, f"{value:.0%}", anchor="start"))
    height = row * len(values) + 20
    marks.append(Text((start + WIDTH) / 2, height - 6, x_label))
    return Plot(x_label, marks, height)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours on both sides, with fewer neighbours at the ends."""
    reach = max(len(values) // MIN_SMOOTHED_POINTS, 2)
    means = []
    for number in range(len(values)):
        window = values[max(number - reach, 0) : number + reach + 1]
        means.append(sum(window) / len(window))
    return means


# ---- axes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """Points joined by a line, or marked by dots of a radius, or both. A value that is not finite leaves a gap."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: str
    width: float = 1.8
    opacity: float = 1.0
    dot: float = 0.0
    is_ring: bool = False

    def pieces(self) -> list[list[Point]]:
        """Return the points that can be drawn, in pieces between the gaps."""
        pieces: list[list[Point]] = [[]]
        for x, y in zip(self.xs, self.ys, strict=True):
            if math.isfinite(x) and math.isfinite(y):
                pieces[-1].append((x, y))
            else:
                pieces.append([])
        return pieces


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
    from zero. `ticks_x`: places at the horizontal axis and their names, in place of round numbers. `notes`: x, y, text,
    colour of texts beside points, and whether they stand above.
    """
    points = []
    for line in lines:
        for piece in line.pieces():
            points += piece
    xs, ys = zip(*points or [(0.0, 0.0)], strict=True)
    is_over_steps = x_label is None
    # Texts beside points need space at the edges.
    margin_x = 0.03 if is_over_steps else 0.1
    margin_y = 0.15 if is_over_steps else 0.22
    scale_x = _Scale(xs, margin_x, LEFT, RIGHT, from_zero=is_over_steps)
    scale_y = _Scale(ys, margin_y, BOTTOM, TOP, from_zero=y_from_zero)
    marks: list[Mark] = []
    for value in scale_y.ticks(MAX_TICKS_Y):
        y = scale_y.at(value)
        marks.append(Stroke([(LEFT, y), (RIGHT, y)], GRID_COLOUR, 0.8))
        marks.append(Text(LEFT - 4, y + 0.35 * FONT_SIZE, write(value), anchor="end"))
    marks.append(Stroke([(LEFT, BOTTOM), (RIGHT, BOTTOM)], GRID_COLOUR, 0.8))
    if is_over_steps:
        steps = scale_x.ticks(MAX_TICKS_X, smallest=1.0)
        ticks_x = [(step, f"{step:,.0f}") for step in steps]
    elif not ticks_x:
        ticks_x = [(value, f"{value:g}") for value in scale_x.ticks(MAX_TICKS_X)]
    for value, name in ticks_x:
        marks.append(Text(scale_x.at(value), BOTTOM + 13, name))
    marks.append(Text((LEFT + RIGHT) / 2, BOTTOM + 27, x_label or "step"))
    for line in lines:
        for piece in line.pieces():
            places = [(scale_x.at(x), scale_y.at(y)) for x, y in piece]
            if len(places) > 1:
                marks.append(Stroke(places, line.colour, line.width, line.opacity))
            if line.dot:
                for x, y in places:
                    marks.append(Dot(x, y, line.dot, line.colour, line.is_ring))
    for x, y, text, colour, is_above in notes:
        offset = -8.0 if is_above else 8.0 + 0.7 * FONT_SIZE
        marks.append(Text(scale_x.at(x), scale_y.at(y) + offset, text, colour))
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

    def ticks(self, at_most: int, smallest: float = 0.0) -> list[float]:
        """Return round values of the range: multiples of 1, 2, 2.5 or 5 times a power of ten, `smallest` or more."""
        least = max((self._high - self._low) / at_most, smallest)
        power = 10.0 ** math.floor(math.log10(least))
        # The tolerance keeps a step that is the wanted one but for rounding.
        for factor in (1, 2, 2.5, 5, 10):
            step = factor * power
            # With `smallest` 1 (steps of a run) 2.5 is no step.
            is_allowed = not smallest or step % smallest == 0
            if is_allowed and step >= least * (1 - 1e-9):
                break
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]
