"""Qwen2-VL to Qwen3.5: an image keeps its shape within bounds of its pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import InvalidRequest
from baton.router.pictures.families.settings import (
    LOW_DETAIL_EDGE,
    read_edge,
    read_resample,
    require_flag,
)
from baton.router.pictures.plan import Detail, PicturePlan, Size, whole_image

BICUBIC = 3
MAX_ASPECT = 200


@dataclass(frozen=True, slots=True)
class QwenVlFormat:
    """Implements `PictureFormat`. The chat template writes start and end of an image."""

    min_pixels: int
    max_pixels: int
    token_edge: int  # pixels of a placeholder
    resample: int

    @property
    def mark(self) -> str:
        return "<|image_pad|>"

    @property
    def placeholder(self) -> str:
        return "<|image_pad|>"

    def plan(self, image: Size, detail: Detail = Detail.AUTO) -> PicturePlan:
        if max(image.width, image.height) / min(image.width, image.height) > MAX_ASPECT:
            raise InvalidRequest(
                f"has {image.width}x{image.height} pixels; the longer edge may be {MAX_ASPECT} "
                "times the shorter one for this model: send a part of it"
            )
        size = self._resized(image, self._max_pixels(detail))
        rows, columns = size.height // self.token_edge, size.width // self.token_edge
        text = self.placeholder * (rows * columns)
        return whole_image(size, self.resample, rows, columns, text)

    def _max_pixels(self, detail: Detail) -> int:
        if detail is Detail.LOW:
            return max(self.min_pixels, min(self.max_pixels, LOW_DETAIL_EDGE**2))
        return self.max_pixels

    def _resized(self, image: Size, max_pixels: int) -> Size:
        edge, area = self.token_edge, image.width * image.height
        width, height = (round(each / edge) * edge for each in (image.width, image.height))
        if width * height > max_pixels:
            scale = math.sqrt(area / max_pixels)
            return Size(
                max(edge, math.floor(image.width / scale / edge) * edge),
                max(edge, math.floor(image.height / scale / edge) * edge),
            )
        if width * height < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
            return Size(
                math.ceil(image.width * scale / edge) * edge,
                math.ceil(image.height * scale / edge) * edge,
            )
        return Size(width, height)


def read_qwen_vl(config: JsonFields, processor: JsonFields) -> QwenVlFormat:
    """Read the fields of transformers 5, or `min_pixels` and `max_pixels` of earlier ones."""
    require_flag(processor, "do_resize", True, True)
    vision = config.inner("vision_config")
    patch = processor.positive_int("patch_size", vision.positive_int("patch_size", 14))
    shortest = read_edge(processor, "size", "shortest_edge", 56 * 56)
    longest = read_edge(processor, "size", "longest_edge", 28 * 28 * 1280)
    return QwenVlFormat(
        min_pixels=processor.positive_int("min_pixels", shortest),
        max_pixels=processor.positive_int("max_pixels", longest),
        token_edge=patch * processor.positive_int("merge_size", 2),
        resample=read_resample(processor, BICUBIC),
    )
