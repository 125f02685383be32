"""Files in the messages of OpenAI's APIs, as documents. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.router.doors.file_data import DATA_URL, read_data
from baton.router.doors.openai.request.bodies import Body, validate_body
from baton.router.input_processing.limits import check_file_name
from baton.router.parts import DocumentFile
from baton.router.pictures.plan import Detail, ImageFile
from baton.rpc.errors import UnsupportedInput

SEND_DATA = "send the content as file_data, in base64"
SEND_DATA_URL = "send the image in it, as data:image/png;base64,…"
MAX_UUID_CHARACTERS = 1_024
FETCHED_SCHEMES = ("http", "https")


class FileBody(Body):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class FilePart(Body):
    type: str
    file: FileBody
    prompt_cache_breakpoint: Any = None  # ignored: every prefix is cached


def document_of_part(part: Mapping[str, Any], where: str) -> DocumentFile:
    """Return the file in a part of a chat's message. Raises InvalidRequest, UnsupportedInput."""
    file = validate_body(part, FilePart, where).file
    return document_of_file(file, file.file_data, f"{where}.file", "file_data")


def document_of_file(file: FileBody, data: str | None, where: str, field: str) -> DocumentFile:
    """Return the document in `data`, which is the file's `field`."""
    if file.file_id is not None:
        raise UnsupportedInput(
            f"{where}.file_id: files are not stored here; {SEND_DATA}", f"{where}.file_id"
        )
    if data is None:
        raise InvalidRequest(f"{where}.file_data is missing: {SEND_DATA}", f"{where}.file_data")
    name = file.filename or ""
    check_file_name(f"{where}.filename", name)
    content, media_type = read_data(data, f"{where}.{field}")
    return DocumentFile(where, content, name, media_type=media_type)


# Bodies are strict otherwise, and would take no text for an enum.
DetailField = Annotated[Detail, Field(strict=False)] | None


class ImageUrl(Body):
    url: str | None = None
    detail: DetailField = None


class ImagePart(Body):
    type: str
    image_url: dict[str, Any] | str | None = None
    uuid: str | None = None
    prompt_cache_breakpoint: Any = None  # ignored: every prefix is cached


def image_of_part(part: Mapping[str, Any], where: str) -> ImageFile:
    """Return the image in a part of a chat's message. Raises InvalidRequest, UnsupportedInput."""
    read = validate_body(part, ImagePart, where)
    image, inside, uuid = read.image_url, f"{where}.image_url", read.uuid or ""
    if len(uuid) > MAX_UUID_CHARACTERS:
        raise InvalidRequest(
            f"{where}.uuid has {len(uuid)} characters; it may have {MAX_UUID_CHARACTERS}",
            f"{where}.uuid",
        )
    if isinstance(image, str):
        return replace(image_of_url(image, None, inside), uuid=uuid)
    url = validate_body(image or {}, ImageUrl, inside)
    if url.url is not None:
        return replace(image_of_url(url.url, url.detail, f"{inside}.url"), uuid=uuid)
    if not uuid:
        raise InvalidRequest(f"{inside}.url is missing: {SEND_DATA_URL}", f"{inside}.url")
    return ImageFile(b"", f"{where}.uuid", url.detail or Detail.AUTO, uuid=uuid)


def image_of_url(url: str, detail: Detail | None, where: str) -> ImageFile:
    """Return the image of a URL, whose data it has if the URL does.

    Raises InvalidRequest and UnsupportedInput.
    """
    detail, scheme = detail or Detail.AUTO, url.partition(":")[0].lower()
    if scheme in FETCHED_SCHEMES:
        return ImageFile(b"", where, detail, url)
    if f"{scheme}:" != DATA_URL:
        raise UnsupportedInput(f"{where} is not a URL of data:, http: or https:", where)
    return ImageFile(read_data(url, where)[0], where, detail)


def data_url_of(url: str, where: str) -> str:
    """Return a `data:` URL. Raises UnsupportedInput for URLs that would have to be fetched."""
    if url[: len(DATA_URL)].lower() != DATA_URL:
        raise UnsupportedInput(f"{where}: the router fetches no URLs; {SEND_DATA}", where)
    return url
