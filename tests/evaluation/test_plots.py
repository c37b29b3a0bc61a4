"""Plots: what is drawn where on the page, and the same in the files."""

import math
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from vembed.evaluation.report.plots import (
    ACCENT,
    BOTTOM,
    LEFT,
    PLOT_MARGIN,
    RIGHT,
    RUN_COLOURS,
    TITLE_HEIGHT,
    TOP,
    Curve,
    Dot,
    Stroke,
    Text,
    plot_bars,
    plot_curve,
    plot_dims,
    plot_evaluations,
    plot_runs,
    plot_stored,
)

PIXELS = 3


def curve(values, **options):
    steps = [float(step) for step in range(len(values))]
    return Curve("a < b", "", steps, values, "{:.3g}".format, **options)


def strokes(plot):
    """Lines without the grid."""
    marks = [mark for mark in plot.marks if isinstance(mark, Stroke)]
    return [mark for mark in marks if mark.width != 0.8]


def texts(plot):
    return [mark.text for mark in plot.marks if isinstance(mark, Text)]


def test_values_rise_upwards_between_the_edges_and_the_axes_have_round_numbers():
    plot = plot_curve(curve([0.31, 0.52, 0.87]))
    (stroke,) = strokes(plot)
    xs, ys = zip(*stroke.points, strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys, reverse=True)
    assert all(
        LEFT <= point <= RIGHT and TOP <= y <= BOTTOM for point, y in stroke.points
    )
    assert texts(plot) == ["0.4", "0.6", "0.8", "0", "1", "2", "step"]
    assert 'aria-label="a &lt; b over the steps"' in plot.__html__()


@pytest.mark.parametrize(
    "values", [[0.0], [5.0, 5.0], [-1e-12, 1e-12], [1e9, 3e9], [math.nan, math.inf]]
)
def test_any_values_can_be_drawn(values):
    for from_zero in (False, True):
        svg = plot_curve(curve(values, from_zero=from_zero)).__html__()
        assert svg.count("<text") >= 3
        assert "nan" not in svg and "inf" not in svg


def test_a_gap_and_a_running_mean():
    pieces = strokes(plot_curve(curve([1.0, 2.0, math.nan, 2.0, 1.0])))
    assert [len(piece.points) for piece in pieces] == [2, 2]
    noisy = curve([float(step % 2) for step in range(80)], noisy=True)
    raw, mean = strokes(plot_curve(noisy))
    heights = [
        np.ptp([point for _, point in line.points[5:-5]]) for line in (raw, mean)
    ]
    assert heights[1] < heights[0] / 3


def test_marks_of_evaluations_sizes_forms_and_runs():
    plot = plot_evaluations([0, 5, 10], [0.1, 0.3, 0.2], "nDCG@10", 5)
    rings = [mark for mark in plot.marks if isinstance(mark, Dot) and mark.is_ring]
    assert [ring.x for ring in rings] == [strokes(plot)[0].points[1][0]]
    plot = plot_dims([64, 32], [0.4, 0.3], [0.5, 0.4], "m")
    assert {"before", "after", "64", "dimensions kept"} <= set(texts(plot))
    plot = plot_stored({"binary": [(128, 16, 0.5), (256, 32, 0.6)]}, "m")
    assert {"16", "32", "binary"} <= set(texts(plot))
    plot = plot_runs([(run, curve([1.0, run])) for run in range(len(RUN_COLOURS) + 1)])
    colours = [(stroke.colour, stroke.opacity) for stroke in strokes(plot)]
    assert colours == [
        *((colour, 1.0) for colour in RUN_COLOURS),
        (RUN_COLOURS[0], 0.5),
    ]


def accent(path):
    """[height, width] where a picture has the accent's colour."""
    image = np.asarray(Image.open(path)).astype(int)
    return (np.abs(image - (31, 95, 191)) < 12).all(axis=2)


def test_files_have_colours_of_their_own_and_what_the_page_shows(tmp_path):
    plot = plot_evaluations([0, 5, 10], [0.4, 0.6, 0.5], "a < b", 5)
    path = plot.write(tmp_path / "scores.svg", "nDCG@10 & more")
    assert "var(" not in path.read_text()
    root = ElementTree.fromstring(path.read_bytes())
    names = [shape.text for shape in root if shape.tag.endswith("text")]
    assert {"nDCG@10 & more", "step", "0.600", "0", "10"} <= set(names)
    pixels = accent(plot.write(tmp_path / "scores.png"))
    dots = [mark for mark in plot.marks if isinstance(mark, Dot)]
    assert len(dots) == 4, "three points and a ring"
    for dot in dots:
        x = round((dot.x + PLOT_MARGIN) * PIXELS)
        y = round((dot.y + PLOT_MARGIN + TITLE_HEIGHT) * PIXELS)
        assert dot.colour == ACCENT
        assert pixels[y - 2 : y + 3, x - 2 : x + 3].any()
    assert pixels.mean() < 0.05
    bars = plot_bars({"learning_rate": 0.8, "temperature": 0.2}, "share")
    rows = accent(bars.write(tmp_path / "bars.png")).sum(axis=1)
    lengths = sorted({int(length) for length in rows if length > 20})
    assert lengths[-1] == pytest.approx(4 * lengths[0], rel=0.05)
