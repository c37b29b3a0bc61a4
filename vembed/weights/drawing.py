"""Figures that stand by themselves: an SVG and a PNG, in the look of the report's plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, GRID, ACCENT, QUIET = "#52606d", "#d9dee3", "#1f6feb", "#9aa5b1"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vembed",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.8,
}
SIZE = (4.8, 3.0)
"""Inches."""


def draw_line(
    stem: Path, xs: Sequence[float], ys: Sequence[float], *, x_label: str, y_label: str, best: int
) -> list[Path]:
    """Write a line with its points and a ring around the best one to `stem`.svg and `stem`.png."""

    def draw(axes: Axes) -> None:
        axes.plot(xs, ys, color=ACCENT, marker="o", markersize=4)
        axes.plot([xs[best]], [ys[best]], "o", markersize=10, markerfacecolor="none", markeredgecolor=ACCENT)
        axes.annotate(f"{ys[best]:.4f}", (xs[best], ys[best]), xytext=(0, 9), textcoords="offset points", ha="center")
        axes.margins(x=0.06, y=0.2)

    return _write(stem, draw, x_label, y_label)


def draw_front(
    stem: Path,
    points: Sequence[tuple[float, float]],
    front: Sequence[int],
    start: tuple[float, float],
    *,
    x_label: str,
    y_label: str,
) -> list[Path]:
    """Write all trials as dots, and the line through those that no other one beats in both figures; `start` is the
    model as it was."""

    def draw(axes: Axes) -> None:
        axes.plot([x for x, _ in points], [y for _, y in points], "o", color=QUIET, markersize=4, linewidth=0)
        ordered = sorted(points[place] for place in front)
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], color=ACCENT, marker="o", markersize=5)
        axes.plot([start[0]], [start[1]], "D", color=INK, markersize=5)
        axes.annotate("before", start, xytext=(0, 8), textcoords="offset points", ha="center")
        axes.margins(x=0.1, y=0.2)

    return _write(stem, draw, x_label, y_label)


def draw_bars(stem: Path, values: Mapping[str, float], *, x_label: str) -> list[Path]:
    """Write a horizontal bar for each value, the first one on top."""

    def draw(axes: Axes) -> None:
        names = list(values)
        axes.barh(names, list(values.values()), color=ACCENT, height=0.6)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        for name, value in values.items():
            axes.annotate(f"{value:.0%}", (value, name), xytext=(4, 0), textcoords="offset points", va="center")
        axes.margins(x=0.12)

    return _write(stem, draw, x_label, "")


def _write(stem: Path, draw: Callable[[Axes], None], x_label: str, y_label: str) -> list[Path]:
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "png")]
        figure.savefig(paths[0], metadata={"Date": None, "Creator": None})
        figure.savefig(paths[1], dpi=150)
    return paths
