"""Plots: what is drawn where on the page."""

import re

import pytest

from vembed.evaluation.report.page import render_page
from vembed.evaluation.report.plots import ACCENT, Curve, plot_curves


def curve(values, **options):
    steps = [float(step) for step in range(len(values))]
    return Curve("a < b", "", steps, values, "{:.3g}".format, **options)


def test_values_rise_upwards_between_the_edges_and_the_axes_have_round_numbers():
    plot = plot_curves([(ACCENT, curve([0.31, 0.52, 0.87]))])
    (line,) = plot.lines
    xs, ys = zip(*line.points, strict=True)
    assert 0 <= xs[0] < xs[1] < xs[2] <= 1
    assert 0 <= ys[0] < ys[1] < ys[2] <= 1
    svg = render_page("plot.html.j2", plot=plot)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert texts == ["0.4", "0.6", "0.8", "0", "1", "2", "step"]
    # Of the last path, which is the curve's: y counts downwards in SVG.
    *_, path = re.findall(r'<path d="M([^"]*)"', svg)
    places = [list(map(float, place.split())) for place in path.split("L")]
    xs, ys = zip(*places, strict=True)
    assert xs[0] < xs[1] < xs[2]
    assert ys[0] > ys[1] > ys[2]


@pytest.mark.parametrize("from_zero", [False, True])
@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-1e-12, 1e-12], [1e9, 3e9]])
def test_any_values_can_be_drawn(values, from_zero):
    plot = plot_curves([(ACCENT, curve(values, from_zero=from_zero))])
    svg = render_page("plot.html.j2", plot=plot)
    assert svg.count("<text") >= 3
    assert 'aria-label="a &lt; b by step"' in svg
    assert "nan" not in svg and "inf" not in svg
