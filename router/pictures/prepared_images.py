"""Cache of prepared images, of which a conversation sends the same ones in each turn. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from baton.router.pictures.plan import PreparedImage


class ImageKey(NamedTuple):
    client: str  # so that no client finds out what another one has sent
    name: bytes  # digest of the file and of how it is prepared


class PreparedImages:
    """Keeps the images that were used last, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._image_by_key: OrderedDict[ImageKey, PreparedImage] = OrderedDict()

    def find(self, key: ImageKey) -> PreparedImage | None:
        image = self._image_by_key.get(key)
        if image is not None:
            self._image_by_key.move_to_end(key)
        return image

    def add(self, key: ImageKey, image: PreparedImage) -> None:
        """Keep an image, unless two requests have prepared the same one at the same time."""
        if key in self._image_by_key:
            return
        self._image_by_key[key] = image
        self._num_bytes += image.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._image_by_key.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
