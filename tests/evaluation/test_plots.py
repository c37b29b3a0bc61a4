"""Plots of the report: what is drawn where."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from vembed.evaluation.report.plots import (
    BOTTOM,
    LEFT,
    RIGHT,
    RUNS,
    TOP,
    Curve,
    Line,
    curve_svg,
    dims_svg,
    evaluations_svg,
    runs_svg,
)


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line, without the grid."""
    paths = [
        one.attrib["d"]
        for one in ElementTree.fromstring(svg).iter("path")
        if "H" not in one.attrib["d"]
    ]
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]
        for path in paths
    ]


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter("text")]


def test_values_rise_upwards_between_the_edges_and_the_axes_have_round_numbers() -> (
    None
):
    svg = curve_svg(
        Curve("a < b", "", [10, 20, 30], [0.31, 0.52, 0.87], "{:.3g}".format)
    )
    (points,) = drawn(svg)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in points)
    assert texts(svg) == ["0.4", "0.6", "0.8", "0", "10", "20", "30", "step"]
    assert 'aria-label="a &lt; b over the steps"' in svg


@pytest.mark.parametrize(
    "values", [[0.0], [5.0, 5.0], [-1e-12, 1e-12], [1e9, 3e9], [math.nan, math.inf]]
)
def test_any_values_can_be_drawn(values: list[float]) -> None:
    for from_zero in (False, True):
        svg = curve_svg(
            Curve(
                "Loss", "", list(range(len(values))), values, "{:.3g}".format, from_zero
            )
        )
        assert len(texts(svg)) >= 3
        assert "nan" not in svg and "inf" not in svg


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    svg = curve_svg(
        Curve(
            "Loss", "", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 2.0, 1.0], "{:.3g}".format
        )
    )
    (path,) = re.findall(r'd="(M[^H"]*L[^H"]*)"', svg)
    assert [command for command in path if command in "ML"] == ["M", "L", "M", "L"]


def test_a_long_noisy_curve_also_has_its_running_mean() -> None:
    values = [float(step % 2) for step in range(80)]
    raw, mean = drawn(
        curve_svg(
            Curve("Loss", "", list(range(80)), values, "{:.3g}".format, noisy=True)
        )
    )
    heights = [
        max(y for _, y in of[5:-5]) - min(y for _, y in of[5:-5]) for of in (raw, mean)
    ]
    assert heights[1] < heights[0] / 3


def test_marks_of_evaluations_sizes_and_runs() -> None:
    assert (
        evaluations_svg([0, 5, 10], [0.1, 0.3, 0.2], "nDCG@10", 5).count('r="5"') == 1
    ), "a ring"
    assert {"before", "after", "64", "dimensions kept"} <= set(
        texts(dims_svg([64, 32], [0.4, 0.3], [0.5, 0.4], "m"))
    )
    svg = runs_svg(
        [Line(run, [1, 2], [run, run]) for run in range(len(RUNS) + 1)],
        "Loss",
        "{:.3g}".format,
    )
    assert svg.count("stroke-dasharray") == 1, (
        "the ninth run has the first colour again"
    )
    assert all(colour in svg for colour in RUNS)
