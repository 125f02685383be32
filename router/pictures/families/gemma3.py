"""Gemma 3: every image becomes a square of one size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.checkpoint.json_fields import JsonFields
from baton.router.pictures.families.settings import read_edge, read_resample, require_flag
from baton.router.pictures.plan import Detail, PicturePlan, Size, whole_image

BILINEAR = 2
END = "<end_of_image>"


@dataclass(frozen=True, slots=True)
class Gemma3Format:
    """Implements `PictureFormat`. Detail has no effect."""

    size: Size
    grid: int  # rows and columns of placeholders
    resample: int

    @property
    def mark(self) -> str:
        return "<start_of_image>"

    @property
    def placeholder(self) -> str:
        return "<image_soft_token>"

    def plan(self, image: Size, detail: Detail = Detail.AUTO) -> PicturePlan:
        text = f"\n\n{self.mark}{self.placeholder * self.grid**2}{END}\n\n"
        return whole_image(self.size, self.resample, self.grid, self.grid, text)


def read_gemma3(config: JsonFields, processor: JsonFields) -> Gemma3Format:
    require_flag(processor, "do_resize", True, True)
    require_flag(processor, "do_pan_and_scan", False, False)
    height = read_edge(processor, "size", "height", 224)
    width = read_edge(processor, "size", "width", 224)
    num_tokens = config.positive_int("mm_tokens_per_image", 256)
    return Gemma3Format(
        Size(width, height), math.isqrt(num_tokens), read_resample(processor, BILINEAR)
    )
