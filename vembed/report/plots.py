"""Plots of a run as inline SVG. Colours are the page's CSS variables, so that plots follow light and dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Matplotlib needs actual colours. These stand for the page's CSS variables and are replaced in the finished SVG.
COLOURS = {
    "#010101": "var(--ink-soft)",
    "#020202": "var(--line)",
    "#030303": "var(--accent)",
    "#040404": "var(--before)",
}
INK, GRID, ACCENT, BEFORE = COLOURS
RUNS = tuple(f"#{number:02x}0a0a" for number in range(8))
"""Colours of runs that are compared. With more runs they are used again, with dashed lines."""
COLOURS |= {colour: f"var(--run-{number})" for number, colour in enumerate(RUNS)}
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}
WIDTH, HEIGHT = 4.4, 2.4
"""Size in inches of 72 SVG units. About the width of a phone, so that text keeps its size there."""
PLACE = (0.115, 0.19, 0.87, 0.79)
SMOOTHED_FROM = 40
"""Number of points from which a noisy curve also gets a running mean."""


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

    def draw(axes: Axes) -> None:
        many = curve.noisy and len(curve.steps) >= SMOOTHED_FROM
        axes.plot(curve.steps, curve.values, color=ACCENT, alpha=0.3 if many else 1.0, linewidth=1.0 if many else 1.8)
        if many:
            axes.plot(curve.steps, _running_mean(curve.values), color=ACCENT)
        axes.plot([curve.steps[-1]], [curve.values[-1]], "o", color=ACCENT, markersize=4.5, clip_on=False)
        axes.margins(x=0.03, y=0.15)
        axes.set_xlim(left=0)
        if curve.from_zero:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: curve.write(value)))
        axes.set_xlabel("step")

    return _svg(draw, f"{curve.title} over the steps", curve.title)


def dims_svg(dims: Sequence[int], before: Sequence[float] | None, after: Sequence[float], label: str) -> str:
    """Return a plot of a metric by Matryoshka dimension, before and after. Dimensions are evenly spaced: each is
    about half of the next."""

    def draw(axes: Axes) -> None:
        places = list(range(len(dims)))
        lines = [("after", after, ACCENT)] if before is None else [("before", before, BEFORE), ("after", after, ACCENT)]
        for name, values, colour in lines:
            axes.plot(places, values, color=colour, marker="o", markersize=4.5)
            is_upper = values[0] == max(line[1][0] for line in lines)
            axes.annotate(
                name, (0, values[0]), xytext=(0, 8 if is_upper else -8), textcoords="offset points", color=colour,
                ha="center", va="bottom" if is_upper else "top",
            )  # fmt: skip
        axes.set_xticks(places, [str(dim) for dim in dims])
        axes.set_xlabel("dimensions kept")
        axes.margins(x=0.1, y=0.22)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))

    return _svg(draw, f"{label} by number of dimensions", "dims")


def evaluations_svg(steps: Sequence[int], values: Sequence[float], label: str, final_step: int | None) -> str:
    """Return a plot of the deciding metric over the evaluations. A ring marks the weights that were kept."""

    def draw(axes: Axes) -> None:
        axes.plot(steps, values, color=ACCENT, marker="o", markersize=4)
        if final_step is not None and final_step in steps:
            value = values[list(steps).index(final_step)]
            axes.plot([final_step], [value], "o", markersize=10, markerfacecolor="none", markeredgecolor=ACCENT)
        axes.margins(x=0.06, y=0.2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3f}"))
        axes.set_xlabel("step")

    return _svg(draw, f"{label} over the steps", "evaluations")


@dataclass(frozen=True)
class Line:
    """Curve of one of several runs, and the run's number."""

    run: int
    steps: Sequence[float]
    values: Sequence[float]


def runs_svg(lines: Sequence[Line], label: str, write: Callable[[float], str], *, has_points: bool = False) -> str:
    """Return a plot of one quantity of several runs. `has_points`: mark every value, where they are few; otherwise long
    curves are drawn as their running mean."""

    def draw(axes: Axes) -> None:
        for line in lines:
            many = not has_points and len(line.values) >= SMOOTHED_FROM
            colour, style = RUNS[line.run % len(RUNS)], "-" if line.run < len(RUNS) else "--"
            if many:
                axes.plot(line.steps, line.values, color=colour, alpha=0.2, linewidth=0.8)
            values = _running_mean(line.values) if many else line.values
            axes.plot(line.steps, values, style, color=colour, marker="o" if has_points else "", markersize=4)
            axes.plot([line.steps[-1]], [line.values[-1]], "o", color=colour, markersize=4.5, clip_on=False)
        axes.margins(x=0.03, y=0.15)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
        axes.set_xlabel("step")

    return _svg(draw, f"{label} of several runs over the steps", f"runs {label}")


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours on both sides, with fewer neighbours at the ends."""
    reach = max(len(values) // SMOOTHED_FROM, 2)
    windows = [values[max(place - reach, 0) : place + reach + 1] for place in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _svg(draw: Callable[[Axes], None], description: str, salt: str) -> str:
    with rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(WIDTH, HEIGHT))
        axes = figure.add_axes(PLACE)  # the same in all figures, so that they align
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        draw(axes)
        figure.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(target.getvalue(), description)


def _inline(svg: str, description: str) -> str:
    """Return the SVG for inlining: without prologue, fixed size or own fonts, with the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    start = rf'<svg viewBox="\1" role="img" aria-label="{description}">'
    svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', start, svg, count=1)
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend)_\d+"', "", svg)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    svg = svg.replace("xlink:href", "href")
    for stand_in, variable in COLOURS.items():
        svg = svg.replace(stand_in, variable)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()
