"""Plots as files of their own: SVG with colours of its own, and PNG that is drawn from that SVG."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from math import dist
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image, ImageColor, ImageDraw, ImageFont

from vembed.evaluation.report.plots import FONT_SIZE

COLOURS = {
    "--ink-soft": "#666c75",
    "--line": "#e4e5e2",
    "--accent": "#1f5fbf",
    "--before": "#a3a8ae",
}
"""Those of the page in daylight."""
TITLE_HEIGHT, MARGIN = 16.0, 5.0
SCALE, FINER = 3, 2
"""Pixels of a PNG per unit of the SVG; lines are drawn on a grid so many times finer, which makes them smooth."""
# SVG's text-anchor -> Pillow's: left, middle or right, on the baseline.
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
Point = tuple[float, float]


def picture_svg(svg: str, title: str = "") -> str:
    """Return a plot of the page as a file of its own, with a title above it."""
    for name, colour in COLOURS.items():
        svg = svg.replace(f"var({name})", colour)
    width, height = (
        float(one) for one in ElementTree.fromstring(svg).attrib["viewBox"].split()[2:]
    )
    box = (
        -MARGIN,
        -TITLE_HEIGHT - MARGIN,
        width + 2 * MARGIN,
        height + TITLE_HEIGHT + 2 * MARGIN,
    )
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{" ".join(f"{one:g}" for one in box)}"'
    # Behind the line with the opening tag, which is written anew with the margins.
    inner = svg.partition(">\n")[2]
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n{start} width="{2 * box[2]:g}" font-family="sans-serif">\n'
        f'<rect x="{box[0]:g}" y="{box[1]:g}" width="{box[2]:g}" height="{box[3]:g}" fill="#ffffff"/>\n'
        f'<text x="0" y="-8" font-size="{FONT_SIZE + 1}" fill="#1b1d20" text-anchor="start">{escape(title)}</text>\n'
        f"{inner}\n"
    )


def write_picture(path: Path, svg: str, title: str = "") -> Path:
    """Write a plot as .svg or .png, by the path's suffix."""
    picture = picture_svg(svg, title)
    if path.suffix == ".png":
        picture_image(picture).save(path)
    else:
        path.write_text(picture, encoding="utf-8")
    return path


def picture_image(picture: str) -> Image.Image:
    """Draw what `picture_svg` returned: its paths of M, L and H, circles, rectangles and texts."""
    root = ElementTree.fromstring(picture.encode())
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    fine = SCALE * FINER
    image = Image.new("RGB", (round(width * fine), round(height * fine)), "white")
    draw = ImageDraw.Draw(image)

    def at(x: float, y: float, scale: int) -> Point:
        return (x - left) * scale, (y - top) * scale

    for shape in root:
        kind, given = shape.tag.rpartition("}")[2], shape.attrib
        line = round(float(given.get("stroke-width", "1")) * fine)
        if kind == "path":
            for points in _lines(given["d"], given.get("stroke-dasharray")):
                draw.line(
                    [at(*one, fine) for one in points],
                    _colour(given, "stroke"),
                    line,
                    joint="curve",
                )
        elif kind == "circle":
            x, y = at(float(given["cx"]), float(given["cy"]), fine)
            reach = float(given["r"]) * fine
            box = x - reach, y - reach, x + reach, y + reach
            is_ring = given["fill"] == "none"
            fill, outline = (
                (None, _colour(given, "stroke"))
                if is_ring
                else (_colour(given, "fill"), None)
            )
            draw.ellipse(box, fill, outline, line)
        elif kind == "rect":
            x, y, across, down = (
                float(given[name]) for name in ("x", "y", "width", "height")
            )
            draw.rectangle(
                (*at(x, y, fine), *at(x + across, y + down, fine)),
                _colour(given, "fill"),
            )
    # BOX averages the finer grid. Texts are drawn behind that, since fonts are smooth by themselves.
    image = image.resize(
        (image.width // FINER, image.height // FINER), Image.Resampling.BOX
    )
    draw = ImageDraw.Draw(image)
    for shape in root.iter("{http://www.w3.org/2000/svg}text"):
        given = shape.attrib
        font = ImageFont.load_default(float(given["font-size"]) * SCALE)
        place = at(float(given["x"]), float(given["y"]), SCALE)
        draw.text(
            place,
            shape.text or "",
            _colour(given, "fill"),
            font,
            ANCHORS[given["text-anchor"]],
        )
    return image


def _colour(given: dict[str, str], name: str) -> tuple[int, ...]:
    """Return a colour, mixed with the white below it where it is not opaque."""
    opacity = float(given.get("opacity", "1"))
    return tuple(
        round(255 + (one - 255) * opacity) for one in ImageColor.getrgb(given[name])[:3]
    )


def _lines(path: str, dashes: str | None) -> Iterator[list[Point]]:
    """Yield the lines of a path, cut into dashes if there are any."""
    lines: list[list[Point]] = []
    # H has an x alone, and keeps the y of the point before.
    for command, first, second in re.findall(r"([MLH])([\d.-]+)(?: ([\d.-]+))?", path):
        point = (float(first), float(second) if second else lines[-1][-1][1])
        if command == "M":
            lines.append([point])
        else:
            lines[-1].append(point)
    for line in lines:
        if dashes is None:
            yield line
        else:
            yield from _dashes(line, [float(one) for one in dashes.split()])


def _dashes(line: list[Point], lengths: list[float]) -> Iterator[list[Point]]:
    """Yield the dashes of a line. `lengths`: of a dash and of a gap, in turn."""
    number, left, dash = 0, lengths[0], [line[0]]
    for start, stop in pairwise(line):
        length = dist(start, stop)
        done = 0.0
        # `left`: what is left of this dash or gap, which may go on round the next corner. Even numbers are dashes.
        while length - done > left:
            done += left
            part = done / length
            dash.append(
                (
                    start[0] + part * (stop[0] - start[0]),
                    start[1] + part * (stop[1] - start[1]),
                )
            )
            if number % 2 == 0:
                yield dash
            number, dash = number + 1, dash[-1:]
            left = lengths[number % 2]
        left -= length - done
        dash.append(stop)
    if number % 2 == 0:
        yield dash
