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


def test_values_rise_upwards_between_the_edges_and_the_axes_have_round_numbers():
    plot = plot_curves([(ACCENT, curve([0.31, 0.52, 0.87]))])
    # The lines of the grid are thinner.
    strokes = [mark for mark in plot.marks if isinstance(mark, Stroke)]
    (stroke,) = [mark for mark in strokes if mark.width != 0.8]
    xs, ys = zip(*stroke.points, strict=True)
    assert LEFT <= xs[0] < xs[1] < xs[2] <= RIGHT
    assert BOTTOM >= ys[0] > ys[1] > ys[2] >= TOP
    texts = [mark.text for mark in plot.marks if isinstance(mark, Text)]
    assert texts == ["0.4", "0.6", "0.8", "0", "1", "2", "step"]


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-12, 1e-12], [1e9, 3e9]])
def test_any_values_can_be_drawn(values, from_zero):
    plot = plot_curves([(ACCENT, curve(values, from_zero=from_zero))])
    svg = render_page("plot.html.j2", plot=plot)
    assert svg.count("<text") >= 3
    assert 'aria-label="a &lt; b by step"' in svg
    assert "nan" not in svg and "inf" not in svg
