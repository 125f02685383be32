"""Pictures and texts of images equal those of transformers' processors, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("PIL", reason="baton[images] is not installed")

from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.image_utils import SizeDict
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    convert_image_to_patches,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import (
    get_resize_output_image_size as pixtral_size,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from baton.checkpoint.json_fields import JsonFields
from baton.core.media import Picture
from baton.router.part_readers import FileReading
from baton.router.pictures.families.idefics3 import Idefics3Format
from baton.router.pictures.families.pixtral import PixtralFormat
from baton.router.pictures.families.qwen_vl import MAX_ASPECT, QwenVlFormat
from baton.router.pictures.families.table import FORMATS
from baton.router.pictures.plan import Detail, ImageFile, PictureFormat, PreparedImage, Size
from baton.router.pictures.reader import PictureReader
from tests.support.image_files import animated_file, file_of, image_file, random_image, rotated_file

Pixels = NDArray[np.float32]
SIZES = [(1, 1), (1, 7), (64, 64), (65, 63), (333, 200), (200, 333), (17, 400), (1500, 90)]
THIN = [(1, 20_000), (20_000, 1)]
LARGE = [(2000, 1500)]


@dataclass(frozen=True)
class Family:
    """Settings of a model, and what transformers makes of an image."""

    config: dict[str, Any]
    processor: Any  # transformers' image processor
    expand: Callable[[Any], str]  # its outputs of one image → text
    pixels_of: Callable[[Any], Sequence[Pixels]]
    patches_of: Callable[[Pixels], Pixels] = lambda pixels: pixels
    sizes: Sequence[tuple[int, int]] = (*SIZES, *THIN, *LARGE)

    @property
    def pictures(self) -> PictureFormat:
        read = FORMATS[self.config["model_type"]]
        fields = JsonFields("preprocessor_config.json", self.processor.to_dict())
        return read(JsonFields("config.json", self.config), fields)


def tokenizer(**named: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])), extra_special_tokens=named
    )


def idefics3(splits: bool, edge: int = 256, tile: int = 64) -> Family:
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": edge},
        max_image_size={"longest_edge": tile},
        do_image_splitting=splits,
    )
    grid = tile // 16 // 2
    texts = Idefics3Processor(processor, tokenizer(), image_seq_len=grid**2)
    return Family(
        config={"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 16}},
        processor=processor,
        expand=lambda outputs: texts.replace_image_token(outputs, 0),
        pixels_of=lambda outputs: outputs["pixel_values"][0],
    )


def pixtral() -> Family:
    # Its class of texts needs torchvision: the rule is repeated here.
    def expand(outputs: Any) -> str:
        height, width = outputs["image_sizes"][0]
        tokens = (["[IMG]"] * (width // 28) + ["[IMG_BREAK]"]) * (height // 28)
        return "".join([*tokens[:-1], "[IMG_END]"])

    return Family(
        config={"model_type": "mistral3", "vision_config": {"patch_size": 14}},
        processor=PixtralImageProcessorPil(size={"longest_edge": 700}, patch_size=28),
        expand=expand,
        pixels_of=lambda outputs: outputs["pixel_values"],
        sizes=(*SIZES, *LARGE),
    )


def gemma3() -> Family:
    processor = Gemma3ImageProcessorPil(size={"height": 224, "width": 224}, do_pan_and_scan=False)
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    texts = Gemma3Processor(processor, tokenizer(**names), image_seq_length=16)
    return Family(
        config={"model_type": "gemma3", "mm_tokens_per_image": 16, "vision_config": {}},
        processor=processor,
        expand=lambda outputs: str(texts.replace_image_token(outputs, 0)),
        pixels_of=lambda outputs: outputs["pixel_values"],
    )


def gemma4(max_tokens: int) -> Family:
    processor = Gemma4ImageProcessorPil(max_soft_tokens=max_tokens)

    def expand(outputs: Any) -> str:
        [num_tokens] = outputs["num_soft_tokens_per_image"]
        return f"<|image>{'<|image|>' * num_tokens}<image|>"

    def pixels_of(outputs: Any) -> Sequence[Pixels]:
        is_seen = (outputs["image_position_ids"][0] >= 0).all(axis=1)
        return [outputs["pixel_values"][0][is_seen]]

    return Family(
        config={"model_type": "gemma4", "vision_config": {}},
        processor=processor,
        expand=expand,
        pixels_of=pixels_of,
        patches_of=lambda pixels: convert_image_to_patches(pixels, processor.patch_size),
    )


def qwen(model_type: str, patch: int, least: int, most: int) -> Family:
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most}, patch_size=patch
    )
    texts = object.__new__(Qwen3VLProcessor)  # its constructor needs torchvision
    texts.image_processor, texts.image_token = processor, "<|image_pad|>"
    return Family(
        config={"model_type": model_type, "vision_config": {"patch_size": patch}},
        processor=processor,
        expand=lambda outputs: texts.replace_image_token(outputs, 0),
        pixels_of=lambda outputs: [outputs["pixel_values"]],
        patches_of=lambda pixels: processor.patchify(pixels, patch, 2, 2)[0],
        sizes=[(width, height) for width, height in SIZES if (width, height) != (1, 20_000)]
        + LARGE,
    )


FAMILIES: dict[str, Callable[[], Family]] = {
    "Idefics3": lambda: idefics3(splits=True),
    "Idefics3 without tiles": lambda: idefics3(splits=False),
    "Idefics3 above the limit": lambda: replace(idefics3(True, 5000, 1024), sizes=[(333, 200)]),
    "Pixtral": pixtral,
    "Gemma 3": gemma3,
    "Gemma 4": lambda: gemma4(280),
    "Gemma 4 with few tokens": lambda: gemma4(70),
    "Qwen2.5-VL": lambda: qwen("qwen2_5_vl", 14, 56 * 56, 28 * 28 * 320),
    "Qwen3-VL": lambda: qwen("qwen3_vl", 16, 256 * 256, 1 << 20),
}
MODES = {
    "JPEG": image_file(90, 70, kind="JPEG"),
    "JPEG, grey": image_file(90, 70, "L", "JPEG"),
    "JPEG, CMYK": image_file(90, 70, "CMYK", "JPEG"),
    "JPEG, progressive": file_of(random_image(90, 70), "JPEG", progressive=True, quality=40),
    "PNG, one bit": image_file(90, 70, "1"),
    "PNG, palette": image_file(90, 70, "P"),
    "PNG, palette with a transparent colour": file_of(random_image(90, 70, "P"), transparency=3),
    "PNG, grey with alpha": image_file(90, 70, "LA"),
    "PNG, alpha": image_file(90, 70, "RGBA"),
    "PNG, 16 bits": image_file(90, 70, "I;16"),
    "PNG, a transparent colour": file_of(random_image(90, 70), transparency=(1, 2, 3)),
    "WebP": image_file(90, 70, kind="WEBP"),
    "WebP, alpha": image_file(90, 70, "RGBA", "WEBP"),
    "WebP, animated": animated_file(90, 70, "WEBP"),
    "GIF": image_file(90, 70, "P", "GIF"),
    "GIF, animated": animated_file(90, 70, "GIF"),
    "GIF, transparent": file_of(random_image(90, 70, "P"), "GIF", transparency=5),
    **{f"JPEG, turned by {turn}": rotated_file(90, 70, turn) for turn in range(1, 9)},
    "PNG, turned": rotated_file(90, 70, 6, "PNG"),
    "WebP, turned": rotated_file(90, 70, 8, "WEBP"),
}


def prepare(
    pictures: PictureFormat, files: Sequence[bytes], detail: Detail = Detail.AUTO
) -> list[PreparedImage]:
    images = [ImageFile(data, f"images[{at}]", detail) for at, data in enumerate(files)]
    return asyncio.run(PictureReader().read(images, FileReading(pictures)))


def check(family: Family, files: Sequence[bytes]) -> None:
    for prepared, data in zip(prepare(family.pictures, files), files, strict=True):
        upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        is_tiled = isinstance(family.processor, Idefics3ImageProcessorPil)
        more = {"return_row_col_info": True} if is_tiled else {}
        outputs = family.processor(upright, return_tensors="np", **more)
        placeholder = family.pictures.placeholder
        assert prepared.plan.text == family.expand(outputs)
        num_tokens = sum(tile.num_tokens for tile in prepared.plan.tiles)
        assert num_tokens == prepared.plan.text.count(placeholder)
        found = [family.patches_of(normalized(each, family)) for each in prepared.pictures]
        for own, other in zip(found, family.pixels_of(outputs), strict=True):
            np.testing.assert_array_equal(own, other)


def normalized(picture: Picture, family: Family) -> Pixels:
    pixels = np.frombuffer(picture.rgb, np.uint8).reshape(picture.height, picture.width, 3)
    scaled = family.processor.rescale(np.moveaxis(pixels, -1, 0), 1 / 255)
    result: Pixels = family.processor.normalize(
        scaled, family.processor.image_mean, family.processor.image_std
    )
    return result


@pytest.mark.parametrize("name", FAMILIES)
def test_images_of_all_sizes_are_those_of_transformers(name: str) -> None:
    family = FAMILIES[name]()

    check(family, [image_file(width, height) for width, height in family.sizes])


@pytest.mark.parametrize("name", ["Idefics3", "Qwen2.5-VL"])
def test_images_of_all_modes_are_those_of_transformers(name: str) -> None:
    check(FAMILIES[name](), list(MODES.values()))


def test_low_detail_of_idefics3_is_that_without_tiles() -> None:
    data = image_file(333, 200)
    low = prepare(idefics3(splits=True).pictures, [data], Detail.LOW)
    whole = prepare(idefics3(splits=False).pictures, [data])

    assert low[0].plan == whole[0].plan
    assert low[0].pictures[0].rgb == whole[0].pictures[0].rgb


def test_low_detail_of_gemma4_takes_few_tokens() -> None:
    files = [image_file(333, 200)]
    [low] = prepare(gemma4(280).pictures, files, Detail.LOW)
    [few] = prepare(gemma4(70).pictures, files)
    assert low.plan == few.plan
    assert low.pictures[0].rgb == few.pictures[0].rgb


def blank(size: Size) -> NDArray[np.uint8]:
    """Return pixels that take no memory."""
    return np.broadcast_to(np.uint8(0), (3, size.height, size.width))


class SizesOfIdefics3(Idefics3ImageProcessorPil):  # type: ignore[misc]  # it has no types
    """Computes the sizes of pictures alone."""

    def resize(self, image: Any, size: Any, resample: Any = None, **more: Any) -> Any:
        height, width = (
            get_resize_output_image_size(image, size.longest_edge)
            if size.longest_edge
            else (size.height, size.width)
        )
        return blank(Size(width, height))

    def grid_of(self, image: Size, edge: int, tile: int) -> tuple[Size, int, int]:
        resized = self.resize(blank(image), SizeDict(longest_edge=edge))
        tiled = self.resize_for_vision_encoder(resized, tile)
        _, rows, columns = self.split_images(tiled, {"longest_edge": tile})
        return size_of(resized.shape[1:]), rows, columns


def size_of(height_and_width: tuple[int, int]) -> Size:
    height, width = height_and_width
    return Size(width, height)


edges = st.integers(1, 9_000) | st.integers(1, 70)
sizes = st.builds(Size, edges, edges)


@given(sizes, st.integers(2, 300).map(lambda half: 32 * half), st.sampled_from([64, 384, 512]))
def test_tiles_of_any_size_are_those_of_transformers(image: Size, edge: int, tile: int) -> None:
    plan = Idefics3Format(edge, tile, grid=1, splits=True, resample=1).plan(image)

    resized, rows, columns = SizesOfIdefics3().grid_of(image, edge, tile)

    is_split = max(rows, columns) > 0
    rows, columns = (max(each, is_split) for each in (rows, columns))  # transformers fails for 0
    assert plan.resizes[0] == resized
    assert len(plan.tiles) == rows * columns + 1
    assert f"<row_{rows}_col_{columns}>" in plan.text or not is_split


@given(sizes, st.integers(28, 2_000), st.sampled_from([16, 28, 32]))
def test_rows_of_any_size_are_those_of_transformers(image: Size, edge: int, side: int) -> None:
    (tile,) = PixtralFormat(edge, side, resample=3).plan(image).tiles

    found = size_of(pixtral_size(blank(image), edge, side, "channels_first"))

    # transformers fails for an edge without a token.
    assert tile.size == Size(max(found.width, side), max(found.height, side))


@given(sizes, st.integers(1, 1 << 17), st.integers(1 << 17, 1 << 24), st.sampled_from([28, 32]))
def test_areas_of_any_size_are_those_of_transformers(
    image: Size, least: int, most: int, side: int
) -> None:
    assume(max(image.width, image.height) <= MAX_ASPECT * min(image.width, image.height))

    (tile,) = QwenVlFormat(least, most, side, resample=3).plan(image).tiles

    assert tile.size == size_of(smart_resize(image.height, image.width, side, least, most))
