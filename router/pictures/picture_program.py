"""Reader of images in a confined process, with Pillow.

All headers are read before any pixels: stdout gets a line of JSON for each file, `{}` or
`{"problem": …}`. Then, for each file in turn, stdout gets the size of the upright image or a
problem, stdin the plan, and stdout `{}` or a problem, and the pixels of all tiles.
"""

from __future__ import annotations

import codecs
import json
import struct
import sys
import zlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
IMPORTED_LATER = (  # by Pillow, for some files
    "copy",
    "PIL.ImageColor",
    "PIL.ImagePalette",
    "PIL.MpoImagePlugin",
    "PIL.TiffImagePlugin",
    "PIL.WebPImagePlugin",
)
WHITE = (255, 255, 255, 255)
MAX_TEXT_BYTES = 4 << 20  # of a PNG's texts, of which none but EXIF and XMP are used
# What Pillow raises for a damaged file.
DAMAGE = (
    ArithmeticError,
    LookupError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


Result = tuple[dict[str, object], Any]  # a line, and what the next step takes


class PictureProblem(Exception):
    """An image cannot be read; the message continues "the image"."""


class Reader:
    """Reads images, within a limit for the pixels of each."""

    def __init__(self, max_pixels: int) -> None:
        # Imported, with all that it may import later, before the process can open no more files.
        import PIL
        from PIL import Image, ImageOps, PngImagePlugin

        for module in IMPORTED_LATER:
            import_module(module)
        for codec in ("ascii", "latin-1", "utf-16", "utf-32"):
            codecs.lookup(codec)
        Image.preinit()
        PngImagePlugin.MAX_TEXT_MEMORY = MAX_TEXT_BYTES
        Image.MAX_IMAGE_PIXELS = max_pixels
        self._unidentified = PIL.UnidentifiedImageError
        self._image, self._ops, self._max_pixels = Image, ImageOps, max_pixels

    def read(self, files: list[bytes]) -> None:
        for data in files:
            if answer(partial(self._check_header, data)) is None:
                return
        for data in files:
            if (image := answer(partial(self.upright, data))) is None:
                return
            plan = json.loads(sys.stdin.buffer.readline())
            if (tiles := answer(partial(_cut, image, plan))) is None:
                return
            for tile in tiles:
                sys.stdout.buffer.write(tile)
            sys.stdout.buffer.flush()

    def _check_header(self, data: bytes) -> Result:
        with self._open(data):
            return {}, True

    def _open(self, data: bytes) -> Any:
        try:
            image = self._image.open(BytesIO(data), formats=FORMATS)
        except self._unidentified as error:
            raise PictureProblem(
                "is damaged, or no PNG, JPEG, WebP or GIF: send one of these"
            ) from error
        except self._image.DecompressionBombError as error:
            raise self._too_large() from error
        if image.width * image.height > self._max_pixels:
            raise self._too_large()
        return image

    def _too_large(self) -> PictureProblem:
        return PictureProblem(f"has more than {self._max_pixels} pixels: send it smaller")

    def upright(self, data: bytes) -> Result:
        """Return the first frame, rotated as EXIF says, in RGB: transparency shows white."""
        image = self._open(data)
        self._ops.exif_transpose(image, in_place=True)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = self._image.new("RGBA", image.size, WHITE)
            image = self._image.alpha_composite(white, image)
        image = image if image.mode == "RGB" else image.convert("RGB")
        return {"width": image.width, "height": image.height}, image


def _cut(image: Any, plan: Any) -> Result:
    for size in plan["resizes"]:
        image = image.resize(size, resample=plan["resample"])
    tiles = []
    for left, top, width, height, *size in plan["tiles"]:
        tile = image.crop((left, top, left + width, top + height))
        tiles.append(tile.resize(size, resample=plan["resample"]).tobytes())
    return {}, tiles


def answer(work: Callable[[], Result]) -> Any:
    """Write the line of a result, and return it; None for one with a problem."""
    result = None
    try:
        line, result = work()
    except PictureProblem as problem:
        line = {"problem": str(problem)}
    except MemoryError:
        line = {"problem": "takes too much memory to read: send it smaller"}
    except DAMAGE:
        line = {"problem": "is damaged or incomplete, or unusual: send it saved as a new PNG"}
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    sys.stdout.buffer.flush()
    return result
