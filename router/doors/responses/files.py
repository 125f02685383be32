"""Files in the items of a Responses input, as documents. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.doors.openai.request.bodies import Body
from baton.router.doors.openai.request.files import (
    SEND_DATA_URL,
    DetailField,
    FileBody,
    data_url_of,
    document_of_file,
    image_of_url,
)
from baton.router.parts import Document, DocumentFile
from baton.router.pictures.plan import ImageFile
from baton.rpc.errors import UnsupportedInput


class InputFile(FileBody):
    type: str
    file_url: str | None = None
    # Ignored: they do not affect the answer.
    detail: Any = None
    prompt_cache_breakpoint: Any = None


def document_of_part(file: InputFile, where: str) -> DocumentFile:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    data, field = file.file_data, "file_data"
    if file.file_url is not None:
        if data is not None:
            raise InvalidRequest(f"{where} has file_data and file_url: send one", where)
        data, field = data_url_of(file.file_url, f"{where}.file_url"), "file_url"
    return document_of_file(file, data, where, field)


class InputImage(Body):
    type: str
    image_url: str | None = None
    file_id: str | None = None
    detail: DetailField = None
    prompt_cache_breakpoint: Any = None  # ignored: every prefix is cached


def image_of_part(image: InputImage, where: str) -> ImageFile:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    if image.file_id is not None:
        raise UnsupportedInput(
            f"{where}.file_id: files are not stored here; send image_url", f"{where}.file_id"
        )
    if image.image_url is None:
        raise InvalidRequest(f"{where}.image_url is missing: {SEND_DATA_URL}", where)
    return image_of_url(image.image_url, image.detail, f"{where}.image_url")


def put_texts(items: Sequence[Any], documents: Sequence[Document]) -> None:
    """Replace the files in items of an input by texts, as which they are stored."""
    for document in documents:
        _, item, name, part = document.where.split(".")
        items[int(item)][name][int(part)] = {"type": "input_text", "text": document.text}
