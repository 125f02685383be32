"""Files in the messages of OpenAI's APIs, as documents. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.documents.document import Document, DocumentPart, document_from, parts_of_kind
from baton.router.documents.encodings import DATA_URL, read_data
from baton.router.doors.openai.request.bodies import Body, validate_body
from baton.router.input_processing.limits import check_file_name
from baton.rpc.errors import UnsupportedInput

SEND_DATA = "send the content as file_data, in base64"


class FileBody(Body):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class FilePart(Body):
    type: str
    file: FileBody
    prompt_cache_breakpoint: Any = None  # ignored: every prefix is cached


def chat_documents(fields: Mapping[str, Any]) -> Iterator[DocumentPart]:
    """Yield the files in the messages of a chat. Raises InvalidRequest and UnsupportedInput."""
    messages = fields.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        where = f"messages.{number}.content"
        for place, parts, index, part in parts_of_kind(content, "file", where):
            file = validate_body(part, FilePart, place).file
            document = document_of_file(file, file.file_data, f"{place}.file", "file_data")
            yield DocumentPart(document, parts, index, {"type": "text"})


def document_of_file(file: FileBody, data: str | None, where: str, field: str) -> Document:
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
    return document_from(content, where, name, media_type)


def data_url_of(url: str, where: str) -> str:
    """Return a `data:` URL. Raises UnsupportedInput for URLs that would have to be fetched."""
    if url[: len(DATA_URL)].lower() != DATA_URL:
        raise UnsupportedInput(f"{where}: the router fetches no URLs; {SEND_DATA}", where)
    return url
