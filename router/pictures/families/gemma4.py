"""Gemma 4: an image keeps its shape, as large as a number of tokens allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import InvalidRequest
from baton.router.pictures.families.settings import read_resample, require_flag
from baton.router.pictures.plan import Detail, PicturePlan, Size, whole_image

BICUBIC = 3
TOKEN_COUNTS = (70, 140, 280, 560, 1120)  # that the models know
BEGIN, END = "<|image>", "<image|>"


@dataclass(frozen=True, slots=True)
class Gemma4Format:
    """Implements `PictureFormat`. Low detail takes the smallest number of tokens."""

    max_tokens: int
    patch_edge: int  # pixels
    token_patches: int  # along the edge of a placeholder
    resample: int

    @property
    def mark(self) -> str:
        return "<|image|>"

    @property
    def placeholder(self) -> str:
        return "<|image|>"

    def plan(self, image: Size, detail: Detail = Detail.AUTO) -> PicturePlan:
        num_tokens = TOKEN_COUNTS[0] if detail is Detail.LOW else self.max_tokens
        rows, columns = self._grid(image, min(num_tokens, self.max_tokens))
        edge = self.patch_edge * self.token_patches
        text = f"{BEGIN}{self.placeholder * (rows * columns)}{END}"
        return whole_image(Size(columns * edge, rows * edge), self.resample, rows, columns, text)

    def _grid(self, image: Size, num_tokens: int) -> tuple[int, int]:
        """Return the rows and columns of tokens, with the roundings of transformers."""
        edge = self.patch_edge * self.token_patches
        target = num_tokens * self.token_patches**2 * self.patch_edge**2
        factor = math.sqrt(target / (image.height * image.width))
        rows, columns = (math.floor(factor * each / edge) for each in (image.height, image.width))
        if rows == 0:
            rows, columns = 1, min(math.floor(image.width / image.height), num_tokens)
        elif columns == 0:
            rows, columns = min(math.floor(image.height / image.width), num_tokens), 1
        if not rows or not columns or rows * columns > num_tokens:
            raise InvalidRequest(
                f"has {image.width}x{image.height} pixels, which this model cannot take: send it "
                "in another shape"
            )
        return rows, columns


def read_gemma4(config: JsonFields, processor: JsonFields) -> Gemma4Format:
    require_flag(processor, "do_resize", True, True)
    vision = config.inner("vision_config")
    max_tokens = processor.positive_int("max_soft_tokens", 280)
    if max_tokens not in TOKEN_COUNTS:
        known = ", ".join(map(str, TOKEN_COUNTS))
        raise processor.wrong("max_soft_tokens", f"must be one of {known}")
    return Gemma4Format(
        max_tokens,
        processor.positive_int("patch_size", vision.positive_int("patch_size", 16)),
        processor.positive_int(
            "pooling_kernel_size", vision.positive_int("pooling_kernel_size", 3)
        ),
        read_resample(processor, BICUBIC),
    )
