"""Files in the items of a Responses input, as documents. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton.core.errors import InvalidRequest
from baton.router.documents.document import DocumentPart, parts_of_kind
from baton.router.doors.openai.request.bodies import validate_body
from baton.router.doors.openai.request.files import FileBody, data_url_of, document_of_file

CONTENTS = {"message": "content", "function_call_output": "output"}  # by the type of an item


class InputFile(FileBody):
    type: str
    file_url: str | None = None
    # Ignored: they do not affect the answer.
    detail: Any = None
    prompt_cache_breakpoint: Any = None


def response_documents(fields: Mapping[str, Any]) -> Iterator[DocumentPart]:
    """Yield the files in the input. Raises InvalidRequest and UnsupportedInput."""
    items = fields.get("input")
    for number, item in enumerate(items if isinstance(items, list) else ()):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        name = CONTENTS.get(kind, "") if isinstance(kind, str) else ""
        if not name:
            continue
        where = f"input.{number}.{name}"
        for place, parts, index, part in parts_of_kind(item.get(name), "input_file", where):
            file = validate_body(part, InputFile, place)
            data, field = file.file_data, "file_data"
            if file.file_url is not None:
                if data is not None:
                    raise InvalidRequest(f"{place} has file_data and file_url: send one", place)
                data, field = data_url_of(file.file_url, f"{place}.file_url"), "file_url"
            document = document_of_file(file, data, place, field)
            yield DocumentPart(document, parts, index, {"type": "input_text"})
