"""Images in the prompts of `baton.LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import InvalidRequest
from baton.core.request import EngineRequest
from baton.router.part_readers import FileReading
from baton.router.pictures.plan import (
    ImageFile,
    PictureFormat,
    PreparedImage,
    put_texts,
    segments_in,
)
from baton.router.pictures.reader import PictureReader

if TYPE_CHECKING:
    from PIL.Image import Image

    AnyImage: TypeAlias = str | PathLike[str] | bytes | Image
else:
    AnyImage = Any


class ImagePrompts:
    """Puts images into prompts, as the router does for chats."""

    def __init__(self, tokenizer: Tokenizer, images_as: PictureFormat) -> None:
        self._tokenizer = tokenizer
        self._images_as = images_as
        self._reader = PictureReader()

    def add_to(
        self, request: EngineRequest, text: str, images: Sequence[AnyImage]
    ) -> EngineRequest:
        """Return the request with images in place of the marks in its text.

        Raises InvalidRequest for files that cannot be read, and for too few or many marks.
        """
        files = [ImageFile(_bytes_of(each), f"image {at}") for at, each in enumerate(images)]
        prepared = self._read(files)
        text = put_texts(text, prepared, self._images_as)
        token_ids = tuple(self._tokenizer.encode(text))
        [placeholder] = self._tokenizer.encode_mark(self._images_as.placeholder)
        pictures = {each.digest: each for image in prepared for each in image.pictures}
        return replace(
            request,
            prompt_token_ids=token_ids,
            media=segments_in(token_ids, prepared, placeholder),
            pictures=tuple(pictures.values()),
        )

    def _read(self, files: Sequence[ImageFile]) -> list[PreparedImage]:
        reading = FileReading(self._images_as)
        # On a thread: the caller, such as a notebook, can have an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(self._reader.read(files, reading))).result()


def _bytes_of(image: AnyImage) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | PathLike):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise InvalidRequest(f"the image {image} cannot be read: {error.strerror}") from error
    file = BytesIO()
    image.convert("RGBA" if "A" in image.getbands() else "RGB").save(file, "PNG")
    return file.getvalue()
