"""Plots: what is drawn where on the page."""

import pytest

from vembed.evaluation.report.page import render_page
from vembed.evaluation.report.plots import (
    ACCENT,
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Curve,
    Stroke,
    Text,
    plot_curves,
)


def curve(values, **options):
    steps = [float(step) for step in range(len(values))]
    return Curve("a < b", "", steps, values, "{:.3g}".format, **options)


def svg_of(plot):
    return render_page("plot.html.j2", plot=plot)


def strokes(plot):
    """Lines without the grid."""
    marks = [mark for mark in plot.marks if isinstance(mark, Stroke)]
    return [mark for mark in marks if mark.width != 0.8]


def texts(plot):
    return [mark.text for mark in plot.marks if isinstance(mark, Text)]


def test_values_rise_upwards_between_the_edges_and_the_axes_have_round_numbers():
    plot = plot_curves([(ACCENT, curve([0.31, 0.52, 0.87]))])
    (stroke,) = strokes(plot)
    xs, ys = zip(*stroke.points, strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys, reverse=True)
    assert all(
        LEFT <= point <= RIGHT and TOP <= y <= BOTTOM for point, y in stroke.points
    )
    assert texts(plot) == ["0.4", "0.6", "0.8", "0", "1", "2", "step"]
    assert 'aria-label="a &lt; b by step"' in svg_of(plot)


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-12, 1e-12], [1e9, 3e9]])
def test_any_values_can_be_drawn(values):
    for from_zero in (False, True):
        svg = svg_of(plot_curves([(ACCENT, curve(values, from_zero=from_zero))]))
        assert svg.count("<text") >= 3
        assert "nan" not in svg and "inf" not in svg
