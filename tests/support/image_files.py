"""Image files of all formats and modes, with random pixels."""

from __future__ import annotations

import struct
import zlib
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ZLIB_HEADER = b"\x78\xda"
ADLER_BASE = 65521


def random_image(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(random.integers(0, 1 << 16, (height, width), dtype=np.uint16))
    # Blocks of noise: edges, and areas that compress.
    small = (height // 8 + 1, width // 8 + 1)
    bands = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4, "1": 1, "P": 3}[mode]
    blocks = random.integers(0, 256, (*small, bands), dtype=np.uint8)
    pixels = blocks.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    pixels ^= random.integers(0, 32, pixels.shape, dtype=np.uint8)
    if mode in ("1", "P"):
        return Image.fromarray(pixels if bands == 3 else pixels[:, :, 0]).convert(mode)
    return Image.fromarray(np.ascontiguousarray(pixels.squeeze(-1) if bands == 1 else pixels), mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def image_file(width: int, height: int, mode: str = "RGB", kind: str = "PNG") -> bytes:
    return file_of(random_image(width, height, mode), kind)


def rotated_file(width: int, height: int, orientation: int, kind: str = "JPEG") -> bytes:
    """Return a file whose EXIF data says how to turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(random_image(width, height), kind, exif=exif)


def animated_file(width: int, height: int, kind: str) -> bytes:
    frames = [random_image(width, height, seed=seed) for seed in range(3)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def png_header(width: int, height: int) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)


def png_bomb(width: int, height: int) -> bytes:
    """Return a black PNG, which its compression makes about a thousandth of its pixels.

    Each row is compressed without the ones before it, so that only one is compressed here.
    """
    size = 1 + 3 * width
    compressor = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    row = compressor.compress(bytes(size)) + compressor.flush(zlib.Z_FULL_FLUSH)
    checksum = struct.pack(">HH", size * height % ADLER_BASE, 1)  # Adler-32 of zeros
    pixels = ZLIB_HEADER + height * row + compressor.flush() + checksum
    return png_of(png_header(width, height), (b"IDAT", pixels), (b"IEND", b""))
