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
TITLE_HEIGHT = 16.0
MARGIN = 5.0
PIXELS_PER_UNIT = 3
"""Of a PNG, for a unit of the SVG."""
OVERSAMPLING = 2
"""Lines are drawn on a grid so many times finer, which makes them smooth."""
# SVG's text-anchor -> Pillow's: left, middle or right, on the baseline.
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}
Point = tuple[float, float]


def picture_svg(svg: str, title: str = "") -> str:
    """Return a plot of the page as a file of its own, with a title above it."""
    for name, colour in COLOURS.items():
        svg = svg.replace(f"var({name})", colour)
    _, _, inner_width, inner_height = _view_box(ElementTree.fromstring(svg))
    left = -MARGIN
    top = -TITLE_HEIGHT - MARGIN
    width = inner_width + 2 * MARGIN
    height = inner_height + TITLE_HEIGHT + 2 * MARGIN
    box = f"{left:g} {top:g} {width:g} {height:g}"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}"'
    # Behind the line with the opening tag, which is written anew with the margins.
    inner = svg.partition(">\n")[2]
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n{start} width="{2 * width:g}" font-family="sans-serif">\n'
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" fill="#ffffff"/>\n'
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
    left, top, width, height = _view_box(root)
    fine = PIXELS_PER_UNIT * OVERSAMPLING
    image = Image.new("RGB", (round(width * fine), round(height * fine)), "white")
    draw = ImageDraw.Draw(image)

    def at(x: float, y: float, scale: int) -> Point:
        return (x - left) * scale, (y - top) * scale

    for shape in root:
        kind = shape.tag.rpartition("}")[2]
        attributes = shape.attrib
        line_width = round(float(attributes.get("stroke-width", "1")) * fine)
        if kind == "path":
            colour = _colour(attributes, "stroke")
            for points in _lines(attributes["d"], attributes.get("stroke-dasharray")):
                pixels = [at(x, y, fine) for x, y in points]
                draw.line(pixels, colour, line_width, joint="curve")
        elif kind == "circle":
            x, y = at(float(attributes["cx"]), float(attributes["cy"]), fine)
            radius = float(attributes["r"]) * fine
            box = (x - radius, y - radius, x + radius, y + radius)
            if attributes["fill"] == "none":
                colour = _colour(attributes, "stroke")
                draw.ellipse(box, outline=colour, width=line_width)
            else:
                draw.ellipse(box, _colour(attributes, "fill"), width=line_width)
        elif kind == "rect":
            x = float(attributes["x"])
            y = float(attributes["y"])
            end_x = x + float(attributes["width"])
            end_y = y + float(attributes["height"])
            corners = (*at(x, y, fine), *at(end_x, end_y, fine))
            draw.rectangle(corners, _colour(attributes, "fill"))
    # BOX averages the finer grid. Texts are drawn behind that, since fonts are smooth by themselves.
    size = (image.width // OVERSAMPLING, image.height // OVERSAMPLING)
    image = image.resize(size, Image.Resampling.BOX)
    draw = ImageDraw.Draw(image)
    for shape in root.iter("{http://www.w3.org/2000/svg}text"):
        attributes = shape.attrib
        font = ImageFont.load_default(float(attributes["font-size"]) * PIXELS_PER_UNIT)
        pixel = at(float(attributes["x"]), float(attributes["y"]), PIXELS_PER_UNIT)
        colour = _colour(attributes, "fill")
        anchor = ANCHORS[attributes["text-anchor"]]
        draw.text(pixel, shape.text or "", colour, font, anchor)
    return image


def _view_box(root: ElementTree.Element) -> tuple[float, float, float, float]:
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    return left, top, width, height


def _colour(attributes: dict[str, str], name: str) -> tuple[int, ...]:
    """Return a colour, mixed with the white below it where it is not opaque."""
    opacity = float(attributes.get("opacity", "1"))
    channels = ImageColor.getrgb(attributes[name])[:3]
    return tuple(round(255 + (channel - 255) * opacity) for channel in channels)


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
            yield from _dashes(line, [float(length) for length in dashes.split()])


def _dashes(line: list[Point], lengths: list[float]) -> Iterator[list[Point]]:
    """Yield the dashes of a line. `lengths`: of a dash and of a gap, in turn."""
    number = 0
    left = lengths[0]
    dash = [line[0]]
    for start, stop in pairwise(line):
        length = dist(start, stop)
        done = 0.0
        # `left`: what is left of this dash or gap, which may go on round the next corner. Even numbers are dashes.
        while length - done > left:
            done += left
            fraction = done / length
            x = start[0] + fraction * (stop[0] - start[0])
            y = start[1] + fraction * (stop[1] - start[1])
            dash.append((x, y))
            if number % 2 == 0:
                yield dash
            number += 1
            dash = [(x, y)]
            left = lengths[number % 2]
        left -= length - done
        dash.append(stop)
    if number % 2 == 0:
        yield dash
