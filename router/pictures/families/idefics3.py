"""Idefics3 and SmolVLM: a grid of square tiles, and the whole image as one more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.checkpoint.json_fields import JsonFields
from baton.router.pictures.families.settings import read_edge, read_resample, require_flag
from baton.router.pictures.plan import Detail, PicturePlan, Size, Tile

LANCZOS = 1
MAX_EDGE = 4096  # of a resized image
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True)
class Idefics3Format:
    """Implements `PictureFormat`."""

    longest_edge: int
    tile_edge: int
    grid: int  # rows and columns of a tile's placeholders
    splits: bool
    resample: int

    @property
    def mark(self) -> str:
        return "<image>"

    @property
    def placeholder(self) -> str:
        return "<image>"

    def plan(self, image: Size, detail: Detail = Detail.AUTO) -> PicturePlan:
        resized = _below_max(_with_longest_edge(image, self.longest_edge))
        tile = Size(self.tile_edge, self.tile_edge)
        tiled = self._multiple_of_tiles(resized)
        if not self.splits or detail is Detail.LOW or tiled == tile:
            only = tiled if self.splits and detail is not Detail.LOW else tile
            whole = Tile(0, 0, only, tile, self.grid, self.grid)
            return PicturePlan((resized, only), self.resample, (whole,), self._whole_text())
        rows, columns = tiled.height // self.tile_edge, tiled.width // self.tile_edge
        parts = [
            Tile(column * tile.width, row * tile.height, tile, tile, self.grid, self.grid)
            for row in range(rows)
            for column in range(columns)
        ]
        whole = Tile(0, 0, tiled, tile, self.grid, self.grid)
        text = self._tiles_text(rows, columns) + "\n" + self._whole_text()
        return PicturePlan((resized, tiled), self.resample, (*parts, whole), text)

    def _multiple_of_tiles(self, size: Size) -> Size:
        aspect = size.width / size.height
        if size.width >= size.height:
            width = self._round_up(size.width)
            return Size(width, self._round_up(int(width / aspect)))
        height = self._round_up(size.height)
        return Size(self._round_up(int(height * aspect)), height)

    def _round_up(self, pixels: int) -> int:
        # An edge of a pixel can be rounded to 0, for which transformers fails.
        return max(math.ceil(pixels / self.tile_edge), 1) * self.tile_edge

    def _tiles_text(self, rows: int, columns: int) -> str:
        lines = [
            "".join(f"{AROUND}<row_{row}_col_{column}>{self._run()}" for column in _from_1(columns))
            for row in _from_1(rows)
        ]
        return "".join(f"{line}\n" for line in lines)

    def _whole_text(self) -> str:
        return f"{AROUND}{WHOLE}{self._run()}{AROUND}"

    def _run(self) -> str:
        return self.placeholder * self.grid**2


def read_idefics3(config: JsonFields, processor: JsonFields) -> Idefics3Format:
    require_flag(processor, "do_resize", True, True)
    tile_edge = read_edge(processor, "max_image_size", "longest_edge", 364)
    patch = config.inner("vision_config").positive_int("patch_size", 32)
    return Idefics3Format(
        longest_edge=read_edge(processor, "size", "longest_edge", 4 * 364),
        tile_edge=tile_edge,
        grid=tile_edge // patch // config.positive_int("scale_factor", 2),
        splits=processor.flag("do_image_splitting", True),
        resample=read_resample(processor, LANCZOS),
    )


def _with_longest_edge(size: Size, edge: int) -> Size:
    aspect = size.width / size.height
    if size.width >= size.height:
        return Size(edge, max(_even(int(edge / aspect)), 1))
    return Size(max(_even(int(edge * aspect)), 1), edge)


def _below_max(size: Size) -> Size:
    aspect = size.width / size.height
    if size.width >= size.height and size.width > MAX_EDGE:
        return Size(MAX_EDGE, max(int(MAX_EDGE / aspect), 1))
    if size.height > size.width and size.height > MAX_EDGE:
        return Size(max(int(MAX_EDGE * aspect), 1), MAX_EDGE)
    return size


def _even(number: int) -> int:
    return number + number % 2


def _from_1(count: int) -> range:
    return range(1, count + 1)
