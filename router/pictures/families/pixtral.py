"""Mistral 3 with Pixtral's tower: an image keeps its shape, and each row ends with a token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.checkpoint.json_fields import JsonFields
from baton.router.pictures.families.settings import (
    LOW_DETAIL_EDGE,
    read_edge,
    read_resample,
    require_flag,
)
from baton.router.pictures.plan import Detail, PicturePlan, Size, whole_image

BICUBIC = 3
ROW_END, IMAGE_END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True)
class PixtralFormat:
    """Implements `PictureFormat`."""

    longest_edge: int
    token_edge: int  # pixels of a placeholder
    resample: int

    @property
    def mark(self) -> str:
        return "[IMG]"

    @property
    def placeholder(self) -> str:
        return "[IMG]"

    def plan(self, image: Size, detail: Detail = Detail.AUTO) -> PicturePlan:
        edge = self.longest_edge
        if detail is Detail.LOW:
            edge = min(edge, LOW_DETAIL_EDGE)
        ratio = max(image.height / edge, image.width / edge)
        width, height = image.width, image.height
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        # A thin image's shorter edge can be 0 now, for which transformers fails.
        columns, rows = (max((each - 1) // self.token_edge + 1, 1) for each in (width, height))
        text = ROW_END.join([self.placeholder * columns] * rows) + IMAGE_END
        size = Size(columns * self.token_edge, rows * self.token_edge)
        return whole_image(size, self.resample, rows, columns, text)


def read_pixtral(config: JsonFields, processor: JsonFields) -> PixtralFormat:
    require_flag(processor, "do_resize", True, True)
    patch = config.inner("vision_config").positive_int("patch_size", 16)
    return PixtralFormat(
        longest_edge=read_edge(processor, "size", "longest_edge", 1024),
        token_edge=patch * config.positive_int("spatial_merge_size", 2),
        resample=read_resample(processor, BICUBIC),
    )
