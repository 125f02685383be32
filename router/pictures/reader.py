"""Prepares the images of a request in a process, for which clients take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import ClassVar

from baton.core.errors import InvalidRequest
from baton.core.media import Picture
from baton.router.confined.process import reading_slots
from baton.router.fair_slots import has_token
from baton.router.part_readers import FileReading
from baton.router.pictures.picture_process import PictureLimits, Pixels, read_pixels
from baton.router.pictures.plan import (
    ImageFile,
    ImageKey,
    ImageSource,
    PictureFormat,
    PreparedImage,
    PreparedImages,
)
from baton.rpc.errors import UnsupportedInput
from baton.telemetry import names
from baton.telemetry.tracing.spans import AttributeValue

FRAME_BYTES = 8  # of the length before a field of a digest
DEFAULT_LIMITS = PictureLimits()


class PictureReader:
    kind: ClassVar = ImageFile

    def __init__(
        self, limits: PictureLimits = DEFAULT_LIMITS, source: ImageSource | None = None
    ) -> None:
        """`source`: of images that are URLs; None: these are refused."""
        self._limits = limits
        self._source = source
        self._slots = reading_slots("requests with images")
        self._prepared = PreparedImages(limits.max_cached_bytes)

    async def read(self, files: Sequence[ImageFile], reading: FileReading) -> list[PreparedImage]:
        """Return the images as a model takes them. Raises as `PartReader` says."""
        if reading.images_as is None:
            where = files[0].where
            raise UnsupportedInput(
                f"{where}: model {reading.model!r} takes no images: send text only", where
            )
        self._check(files)
        reading.hold(sum(len(image.data) for image in files))
        images = await self._fetched(files, reading)
        with reading.trace(names.PREPARE_IMAGES) as attributes:
            prepared = await self._prepare(images, reading.images_as, reading.client, attributes)
        num_bytes = sum({id(image): image.num_bytes for image in prepared}.values())
        self._check_size(images[0], num_bytes)
        reading.hold(num_bytes)
        return prepared

    async def _prepare(
        self,
        images: Sequence[ImageFile],
        pictures: PictureFormat,
        client: str,
        attributes: dict[str, AttributeValue],
    ) -> list[PreparedImage]:
        # On a thread: files have megabytes.
        tenant = client if has_token(client) else ""
        digests = await asyncio.to_thread(_names_of, images, pictures)
        keys = [
            self._key_of(image, ImageKey(tenant, digest))
            for image, digest in zip(images, digests, strict=True)
        ]
        found = {key: self._prepared.find(key) for key in keys}
        missing = {
            key: image for key, image in zip(keys, images, strict=True) if found[key] is None
        }
        read = await self._read(missing, pictures, client) if missing else {}
        whole = {key: found[key] or read[key] for key in keys}
        attributes |= {
            names.IMAGES: len(whole),
            names.IMAGES_CACHED: len(whole) - len(missing),
            names.PICTURES: sum(len(image.pictures) for image in whole.values()),
        }
        for image, key in zip(images, keys, strict=True):
            if image.uuid:
                self._prepared.name(ImageKey(tenant, _name_by_uuid(image, pictures)), key)
        return [whole[key] for key in keys]

    def _key_of(self, image: ImageFile, named: ImageKey) -> ImageKey:
        """Return the key of an image, which a uuid in place of the content can name."""
        key = named if image.has_content else self._prepared.find_key(named)
        if key is None:
            raise InvalidRequest(
                f"{image.where}: no image with this uuid is kept here for this client and this "
                "detail: send the image itself, too",
                image.where,
            )
        return key

    async def _fetched(
        self, images: Sequence[ImageFile], reading: FileReading
    ) -> Sequence[ImageFile]:
        linked = [image for image in images if image.url]
        if not linked:
            return images
        if self._source is None:
            where = linked[0].where
            raise UnsupportedInput(
                f"{where}: this router fetches no URLs: send the image itself, in base64, or name "
                "its host in --image-hosts of the router",
                where,
            )
        with reading.trace(names.FETCH_IMAGES) as attributes:
            attributes[names.IMAGES] = len(linked)
            files = await self._source.fetch(linked, reading.client, reading.hold)
            attributes[names.IMAGE_BYTES] = sum(len(image.data) for image in files)
        fetched = iter(files)
        return [next(fetched) if image.url else image for image in images]

    async def _read(
        self, images: Mapping[ImageKey, ImageFile], pictures: PictureFormat, client: str
    ) -> dict[ImageKey, PreparedImage]:
        async with self._slots.slot(client):
            pixels = await read_pixels(list(images.values()), pictures, self._limits)
        read = {key: _prepared(key.name, each) for key, each in zip(images, pixels, strict=True)}
        for key, image in read.items():
            self._prepared.add(key, image)
        return read

    def _check_size(self, first: ImageFile, num_bytes: int) -> None:
        """Check the pixels of all images, those that were kept included."""
        most = self._limits.max_prepared_bytes
        if num_bytes > most:
            raise InvalidRequest(
                f"{first.where}: this and the images after it become {num_bytes >> 20} MiB of "
                f"pixels for this model; they may be {most >> 20} MiB: send fewer, or ask for "
                '"detail": "low"',
                first.where,
            )

    def _check(self, images: Sequence[ImageFile]) -> None:
        most = self._limits.max_images
        if len(images) > most:
            raise InvalidRequest(
                f"the request has {len(images)} images; it may have {most}: send fewer",
                images[most].where,
            )
        for image in images:
            if len(image.data) > self._limits.max_file_bytes:
                raise InvalidRequest(
                    f"{image.where}: the image has {len(image.data)} bytes; it may have "
                    f"{self._limits.max_file_bytes}: send it smaller",
                    image.where,
                )


def _names_of(images: Sequence[ImageFile], pictures: PictureFormat) -> list[bytes]:
    """Name images by their content, also those with a uuid: two can have the same one."""
    return [
        _name(image.data, image, pictures) if image.has_content else _name_by_uuid(image, pictures)
        for image in images
    ]


def _name_by_uuid(image: ImageFile, pictures: PictureFormat) -> bytes:
    return _digest(b"uuid", _name(image.uuid.encode(), image, pictures))


def _name(content: bytes, image: ImageFile, pictures: PictureFormat) -> bytes:
    return _digest(content, repr(pictures).encode(), image.detail.value.encode())


def _prepared(name: bytes, pixels: Pixels) -> PreparedImage:
    tiles = enumerate(zip(pixels.plan.tiles, pixels.tiles, strict=True))
    pictures = (
        Picture(_digest(name, b"%d" % number), tile.size.height, tile.size.width, rgb)
        for number, (tile, rgb) in tiles
    )
    return PreparedImage(pixels.plan, tuple(pictures))


def _digest(*fields: bytes) -> bytes:
    """Hash fields with their lengths, so that no two lists of fields are the same bytes."""
    digest = sha256()
    for content in fields:
        digest.update(len(content).to_bytes(FRAME_BYTES, "big"))
        digest.update(content)
    return digest.digest()
