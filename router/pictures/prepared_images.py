"""Cache of prepared images, of which a conversation sends the same ones in each turn. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from baton.router.pictures.plan import PreparedImage

MAX_UUIDS = 4_096  # of all clients


class ImageKey(NamedTuple):
    client: str  # so that no client finds out what another one has sent
    name: bytes  # digest of the file, or of a client's uuid, and of how it is prepared


class PreparedImages:
    """Keeps the images that were used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._image_by_key: OrderedDict[ImageKey, PreparedImage] = OrderedDict()
        self._key_by_uuid: OrderedDict[ImageKey, ImageKey] = OrderedDict()

    def find(self, key: ImageKey) -> PreparedImage | None:
        image = self._image_by_key.get(key)
        if image is not None:
            self._image_by_key.move_to_end(key)
        return image

    def find_key(self, uuid: ImageKey) -> ImageKey | None:
        """Return the key of the image that was sent last with a uuid, if it is still here."""
        key = self._key_by_uuid.get(uuid)
        if key is not None:
            self._key_by_uuid.move_to_end(uuid)
        return key if key in self._image_by_key else None

    def name(self, uuid: ImageKey, key: ImageKey) -> None:
        """Let a uuid stand for an image from now on."""
        self._key_by_uuid[uuid] = key
        self._key_by_uuid.move_to_end(uuid)
        if len(self._key_by_uuid) > MAX_UUIDS:
            self._key_by_uuid.popitem(last=False)

    def add(self, key: ImageKey, image: PreparedImage) -> None:
        """Keep an image, unless two requests have prepared the same one at the same time."""
        if key in self._image_by_key:
            return
        self._image_by_key[key] = image
        self._num_bytes += image.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._image_by_key.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
