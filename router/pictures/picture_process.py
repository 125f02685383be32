"""Reads images in a confined process, in which they become the pixels of pictures."""

from __future__ import annotations

import json
from asyncio import IncompleteReadError, timeout
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic_core import from_json

from baton.core.errors import InvalidRequest
from baton.router.confined.process import (
    ConfinedProcess,
    FileReader,
    ProcessLimits,
    confined_process,
)
from baton.router.pictures.plan import ImageFile, PictureFormat, PicturePlan, Size, Tile

IMAGES = FileReader(
    path=Path(__file__).with_name("picture_program.py"),
    package="PIL",
    extra="images",
    files="images",
    remedy="send it smaller",
)

UNREADABLE = "cannot be read: send another file"


@dataclass(frozen=True, slots=True)
class PictureLimits(ProcessLimits):
    """Limits of all images of one request, and of those that are kept."""

    cpu_s: int = 30
    memory_bytes: int = 1 << 30
    max_images: int = 100
    max_file_bytes: int = 20 << 20  # of one image
    max_pixels: int = 1 << 25  # of one image; 7680x4320 are fewer
    # Of all pictures, tiles included, which a node gets in one message (MAX_MESSAGE_BYTES).
    max_prepared_bytes: int = 48 << 20
    max_cached_bytes: int = 128 << 20  # of all requests


class Pixels(NamedTuple):
    plan: PicturePlan
    tiles: list[bytes]


async def read_pixels(
    images: Sequence[ImageFile],
    pictures: PictureFormat,
    limits: PictureLimits,
    reader: FileReader = IMAGES,
) -> list[Pixels]:
    """Return the plan of each image, and the pixels of its tiles.

    Raises InvalidRequest, which names the field, UnsupportedInput without the package that reads
    images, and QueueFull if no process can start.
    """
    async with confined_process(reader, limits, (limits.max_pixels,)) as process:
        conversation = _Conversation(process, pictures, limits.max_prepared_bytes, images[0])
        try:
            async with timeout(limits.wall_s):
                return await conversation.run(images)
        except TimeoutError:
            raise conversation.invalid(process.problem_of_time()) from None


class _Conversation:
    """Exchange with a process that reads images, one after the other."""

    def __init__(
        self,
        process: ConfinedProcess,
        pictures: PictureFormat,
        max_prepared_bytes: int,
        first: ImageFile,
    ) -> None:
        self._process = process
        self._pictures = pictures
        self._bytes_left = self._max_prepared_bytes = max_prepared_bytes
        self._image = first  # the one that is being read

    def invalid(self, problem: str) -> InvalidRequest:
        where = self._image.where
        return InvalidRequest(f"{where}: the image {problem}", where)

    async def run(self, images: Sequence[ImageFile]) -> list[Pixels]:
        await self._process.send_files([image.data for image in images])
        for self._image in images:
            await self._receive_line()
        read = []
        for self._image in images:
            read.append(await self._read_next())
        return read

    async def _read_next(self) -> Pixels:
        match await self._receive_line():
            case {"width": int(width), "height": int(height)} if width > 0 and height > 0:
                plan = self._plan(Size(width, height))
            case _:
                raise self.invalid(UNREADABLE)
        await self._process.send([_line_of(plan)])
        await self._receive_line()
        return Pixels(plan, [await self._receive_tile(tile) for tile in plan.tiles])

    def _plan(self, size: Size) -> PicturePlan:
        try:
            plan = self._pictures.plan(size, self._image.detail)
        except InvalidRequest as error:
            raise self.invalid(str(error)) from error
        self._bytes_left -= sum(tile.num_bytes for tile in plan.tiles)
        if self._bytes_left < 0:
            raise self.invalid(
                "is one too many: all images of a request may become "
                f"{self._max_prepared_bytes >> 20} MiB of pixels for this model; send fewer, or "
                'ask for "detail": "low"'
            )
        return plan

    async def _receive_line(self) -> dict[str, object]:
        """Return the next result. Raises InvalidRequest for a problem, or an end."""
        try:
            line = await self._process.stdout.readline()
            if not line.endswith(b"\n"):
                raise self.invalid(await self._process.problem())
            match from_json(line):
                case {"problem": str(problem)}:
                    raise self.invalid(problem)
                case dict() as result:
                    return result
        except ValueError:  # of what a hostile file has made the process write
            pass
        raise self.invalid(UNREADABLE)

    async def _receive_tile(self, tile: Tile) -> bytes:
        try:
            return await self._process.stdout.readexactly(tile.num_bytes)
        except IncompleteReadError:
            raise self.invalid(await self._process.problem()) from None


def _line_of(plan: PicturePlan) -> bytes:
    orders = {
        "resizes": [(size.width, size.height) for size in plan.resizes],
        "resample": plan.resample,
        "tiles": [
            (
                tile.left,
                tile.top,
                tile.box.width,
                tile.box.height,
                tile.size.width,
                tile.size.height,
            )
            for tile in plan.tiles
        ],
    }
    return json.dumps(orders).encode() + b"\n"
