"""Prepares the images of a request in a process, for which clients take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from baton.core.errors import InvalidRequest
from baton.core.media import Picture
from baton.router.fair_slots import FairSlots
from baton.router.pictures.picture_process import PictureLimits, Pixels, read_pixels
from baton.router.pictures.plan import ImageFile, PictureFormat, PreparedImage

NUM_PROCESSES = 2
MAX_WAITING = 64  # requests, each of which holds its files in memory
FRAME_BYTES = 8  # of the length before a field of a digest


def _new_slots() -> FairSlots:
    return FairSlots(
        NUM_PROCESSES, MAX_WAITING, max_per_client=NUM_PROCESSES // 2, what="requests with images"
    )


@dataclass(frozen=True, slots=True)
class PictureReader:
    limits: PictureLimits = PictureLimits()
    slots: FairSlots = field(default_factory=_new_slots)

    async def read(
        self, images: Sequence[ImageFile], pictures: PictureFormat, client: str
    ) -> list[PreparedImage]:
        """Return the images as a model takes them.

        Clients take turns; `client` is empty without authentication. Raises InvalidRequest, which
        names the field, UnsupportedInput without Pillow, and QueueFull if too many requests wait.
        """
        if not images:
            return []
        self._check(images)
        async with self.slots.slot(client):
            read = await read_pixels(images, pictures, self.limits)
        # On a thread: files have megabytes.
        return await asyncio.to_thread(_prepared, images, pictures, read)

    def _check(self, images: Sequence[ImageFile]) -> None:
        if len(images) > self.limits.max_images:
            raise InvalidRequest(
                f"the request has {len(images)} images; it may have {self.limits.max_images}: send "
                "fewer",
                images[self.limits.max_images].where,
            )
        for image in images:
            if len(image.data) > self.limits.max_file_bytes:
                raise InvalidRequest(
                    f"{image.where}: the image has {len(image.data)} bytes; it may have "
                    f"{self.limits.max_file_bytes}: send it smaller",
                    image.where,
                )


def _prepared(
    images: Sequence[ImageFile], pictures: PictureFormat, read: Sequence[Pixels]
) -> list[PreparedImage]:
    return [
        PreparedImage(
            plan,
            tuple(
                Picture(digest, tile.size.height, tile.size.width, rgb)
                for digest, tile, rgb in zip(
                    picture_digests(image, pictures, len(tiles)), plan.tiles, tiles, strict=True
                )
            ),
        )
        for image, (plan, tiles) in zip(images, read, strict=True)
    ]


def picture_digests(
    image: ImageFile, pictures: PictureFormat, num_pictures: int
) -> Iterable[bytes]:
    """Yield the digest of each picture of an image. No pixels are needed for it."""
    file = sha256(image.data).digest()
    for number in range(num_pictures):
        fields = (file, repr(pictures).encode(), image.detail.value.encode(), b"%d" % number)
        yield _framed_digest(fields)


def _framed_digest(fields: Iterable[bytes]) -> bytes:
    """Hash fields with their lengths, so that no two lists of fields are the same bytes."""
    digest = sha256()
    for content in fields:
        digest.update(len(content).to_bytes(FRAME_BYTES, "big"))
        digest.update(content)
    return digest.digest()
