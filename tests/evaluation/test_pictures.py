"""Plots as files: the PNG shows what the SVG says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from vembed.evaluation.report.pictures import (
    COLOURS,
    PIXELS_PER_UNIT,
    picture_image,
    picture_svg,
    write_picture,
)
from vembed.evaluation.report.plots import bars_svg, front_svg, stored_svg, sweep_svg

ACCENT = (31, 95, 191)


def is_accent(image: Image.Image) -> np.ndarray:
    """[height, width] where the accent's colour is."""
    return (np.abs(np.asarray(image).astype(int) - ACCENT) < 12).all(axis=2)


def test_a_file_has_its_own_colours_and_title(tmp_path: Path) -> None:
    path = write_picture(
        tmp_path / "sweep.svg",
        sweep_svg([0, 0.5, 1], [0.4, 0.6, 0.5], "a < b", 1),
        "nDCG@10 & more",
    )
    root = ElementTree.fromstring(path.read_bytes())
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "nDCG@10 & more" and {"a < b", "0.6000", "0", "1"} <= set(texts)
    assert "var(" not in path.read_text()


def test_the_png_has_the_points_of_the_svg(tmp_path: Path) -> None:
    svg = sweep_svg([0, 1, 2], [0.4, 0.6, 0.5], "step", 1)
    picture = picture_svg(svg)
    path = write_picture(tmp_path / "sweep.png", svg)
    image = Image.open(path)
    left, top, width, height = map(
        float, ElementTree.fromstring(picture.encode()).attrib["viewBox"].split()
    )
    assert image.size == (
        round(width * PIXELS_PER_UNIT),
        round(height * PIXELS_PER_UNIT),
    )
    found = is_accent(image)
    circles = [one.attrib for one in ElementTree.fromstring(svg).iter("circle")]
    assert len(circles) == 4, "three points and a ring"
    for one in circles:
        x, y = (
            (float(one[name]) - start) * PIXELS_PER_UNIT
            for name, start in (("cx", left), ("cy", top))
        )
        assert found[round(y) - 2 : round(y) + 3, round(x) - 2 : round(x) + 3].any()
    assert found.mean() < 0.05


@pytest.mark.parametrize(
    ("form", "is_dashed"), [("binary", True), ("binary_rescored", False)]
)
def test_dashes_are_drawn_as_dashes(form: str, is_dashed: bool) -> None:
    points = {form: [(64, 8, 0.5), (128, 16, 0.5)]}
    found = is_accent(picture_image(picture_svg(stored_svg(points, "nDCG@10"))))
    (rows,) = np.nonzero(found.sum(axis=1) == found.sum(axis=1).max())
    changes = np.abs(np.diff(found[rows[0]].astype(int))).sum()
    assert bool(changes > 10) == is_dashed


def test_trials_and_bars() -> None:
    trials = picture_image(
        picture_svg(front_svg([(0.5, 0.6), (0.7, 0.5)], [0], (0.9, 0.65), "probe"))
    )
    assert is_accent(trials).any()
    bars = is_accent(
        picture_image(
            picture_svg(bars_svg({"learning_rate": 0.8, "temperature": 0.2}, "share"))
        )
    )
    lengths = sorted({int(row.sum()) for row in bars if row.sum() > 20})
    assert lengths[-1] == pytest.approx(4 * lengths[0], rel=0.05)
    assert set(COLOURS) == {"--ink-soft", "--line", "--accent", "--before"}
