"""Drawings of numbers and shapes: what the demo model with a vision tower is trained and tested on.

A seed gives the same picture on each machine with the same fonts: Pillow's own, and those that
matplotlib brings.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]
Box = tuple[int, int, int, int]  # left, top, right, bottom

COLOURS: dict[str, RGB] = {
    "red": (205, 25, 30),
    "orange": (235, 125, 10),
    "green": (25, 140, 50),
    "blue": (35, 70, 215),
    "purple": (135, 35, 165),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
FONTS = ("", "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif")
LIGHT = (215, 255)  # levels of a background
NO_THING = "none"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture and the answers to questions about it."""

    image: Image.Image
    number: str = NO_THING
    number_colour: str = NO_THING
    shape: str = NO_THING
    shape_colour: str = NO_THING
    boxes: tuple[tuple[str, Box], ...] = ()  # of each digit, and of the shape


def draw_any(seed: int | str) -> Drawing:
    """Draw a number, a shape, or both, at random."""
    chosen = random.Random(seed).random()
    return draw(seed, has_number=chosen < 0.8, has_shape=chosen > 0.5)


def draw(
    seed: int | str, number: str | None = None, has_number: bool = True, has_shape: bool = False
) -> Drawing:
    """Draw a number (of two to four digits unless given) or a shape where there is room."""
    rng = random.Random(f"drawing {seed}")
    width = rng.randint(64, 192)
    height = round(width * rng.uniform(0.8, 1.25))
    background = _background(rng)
    image = Image.new("RGB", (width, height), background)
    pen = ImageDraw.Draw(image)
    answers: dict[str, str] = {}
    boxes: list[tuple[str, Box]] = []
    if has_number:
        digits = number or str(rng.randrange(10, 10 ** rng.randint(2, 4)))
        colour, ink = _ink(rng)
        boxes = _write(pen, rng, digits, ink, (width, height), is_small=has_shape)
        answers |= {"number": digits, "number_colour": colour}
    place = _free_square(rng, (width, height), boxes) if has_shape else None
    if place:
        shape = rng.choice(SHAPES)
        colour, ink = _ink(rng)
        _draw_shape(pen, shape, place, ink)
        answers |= {"shape": shape, "shape_colour": colour}
        boxes.append((shape, place))
    return Drawing(image, **answers, boxes=tuple(boxes))


def _background(rng: random.Random) -> RGB:
    if rng.random() < 0.5:
        return 255, 255, 255
    return rng.randint(*LIGHT), rng.randint(*LIGHT), rng.randint(*LIGHT)


def _ink(rng: random.Random) -> tuple[str, RGB]:
    name = rng.choice(list(COLOURS))
    return name, _near(rng, COLOURS[name], 15)


def _near(rng: random.Random, colour: RGB, distance: int) -> RGB:
    red, green, blue = (
        min(max(level + rng.randint(-distance, distance), 0), 255) for level in colour
    )
    return red, green, blue


def _write(
    pen: ImageDraw.ImageDraw,
    rng: random.Random,
    digits: str,
    ink: RGB,
    size: tuple[int, int],
    is_small: bool,
) -> list[tuple[str, Box]]:
    """Write digits somewhere inside, as large as a reader of 64x64 pixels needs them.

    Returns the box of each.
    """
    width, height = size
    largest = 0.45 if is_small else 0.6
    name = rng.choice(FONTS)
    points = round(height * rng.uniform(0.35, largest))
    while True:
        font = _font(name, points)
        left, top, right, bottom = (round(edge) for edge in font.getbbox(digits))
        if right - left <= width * 0.94 and bottom - top <= height * 0.94:
            break
        points -= 1
    x = rng.randint(0, width - (right - left))
    y = rng.randint(0, height - (bottom - top))
    pen.text((x - left, y - top), digits, ink, font)
    ends = [x - left + round(font.getlength(digits[:count])) for count in range(len(digits) + 1)]
    boxes = pairwise(ends)
    return [
        (digit, (start, y, end, y + bottom - top))
        for digit, (start, end) in zip(digits, boxes, strict=True)
    ]


@cache
def _font(name: str, points: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    if not name:
        return ImageFont.load_default(points)
    return ImageFont.truetype(
        Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name}.ttf"), points
    )


def _free_square(
    rng: random.Random, size: tuple[int, int], taken: list[tuple[str, Box]]
) -> Box | None:
    """Return a square that does not touch what is taken, or None if none is found."""
    for _ in range(40):
        side = round(min(size) * rng.uniform(0.25, 0.6))
        x, y = rng.randint(0, size[0] - side), rng.randint(0, size[1] - side)
        square = x, y, x + side, y + side
        if not any(_touch(square, box) for _, box in taken):
            return square
    return None


def _touch(one: Box, other: Box) -> bool:
    is_beside = one[0] > other[2] or one[2] < other[0]
    return not is_beside and one[1] <= other[3] and one[3] >= other[1]


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, box: Box, ink: RGB) -> None:
    left, top, right, bottom = box
    side = right - left
    third = side // 3
    if shape == "circle":
        pen.ellipse(box, ink)
    elif shape == "square":
        pen.rectangle(box, ink)
    elif shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), (left + side / 2, top)], ink)
    elif shape == "cross":
        pen.rectangle((left + third, top, right - third, bottom), ink)
        pen.rectangle((left, top + third, right, bottom - third), ink)
    else:
        middle = left + side / 2, top + side / 2
        pen.polygon([_point(middle, side, corner) for corner in range(10)], ink)


def _point(middle: tuple[float, float], side: int, corner: int) -> tuple[float, float]:
    """Return a corner of a star of five points. Every second one is an inner corner."""
    radius = side / 2 * (0.4 if corner % 2 else 1.0)
    angle = math.pi * corner / 5
    return middle[0] + radius * math.sin(angle), middle[1] - radius * math.cos(angle)
