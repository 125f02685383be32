"""Document blocks of Anthropic's messages, as documents. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from baton.core.errors import InvalidRequest
from baton.router.documents.document import document_from
from baton.router.documents.encodings import read_base64
from baton.router.doors.messages.bodies import Block, TextBlock
from baton.router.doors.openai.request.bodies import Body, validate_body
from baton.router.input_processing.limits import check_file_name
from baton.router.parts import Document
from baton.rpc.errors import UnsupportedInput

NO_CITATIONS = "citations: the answer has none"


class Base64Source(Body):
    type: str
    media_type: Literal["application/pdf", "text/plain"]
    data: str


class TextSource(Body):
    type: str
    media_type: Literal["text/plain"]
    data: str


class ContentSource(Body):
    type: str
    content: str | list[Any]


class Citations(Body):
    enabled: bool = False


class DocumentBlock(Block):
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


SOURCES: Mapping[str, type[Body]] = {
    "base64": Base64Source,
    "text": TextSource,
    "content": ContentSource,
}
# Sources without support.
NOT_HERE = {
    "url": "the router fetches no URLs; send the content as base64",
    "file": "files are not stored here; send the content as base64",
}


def document_of_block(block: DocumentBlock, where: str) -> Document:
    """Raises InvalidRequest and UnsupportedInput, which name the field."""
    check_file_name(f"{where}.title", block.title or "")
    has_citations = block.citations is not None and block.citations.enabled
    warnings = (f"{where}.{NO_CITATIONS}",) if has_citations else ()
    return replace(_document(block, where), context=block.context or "", warnings=warnings)


def _document(block: DocumentBlock, where: str) -> Document:
    name, inside = block.title or "", f"{where}.source"
    match _source(block.source, inside):
        case Base64Source(data=data, media_type=media_type):
            return document_from(read_base64(data, f"{inside}.data"), where, name, media_type)
        case TextSource(data=text):
            return Document(text, where, name)
        case ContentSource(content=content):
            return Document(_text(content, f"{inside}.content"), where, name)
    raise InvalidRequest(f"{inside} has no content", inside)


def _source(source: Mapping[str, Any], where: str) -> Body:
    kind = source.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where}.type must be a text", f"{where}.type")
    if kind not in SOURCES:
        reason = NOT_HERE.get(kind, f"supported here are {', '.join(SOURCES)}")
        raise UnsupportedInput(f"{where}.type is {kind[:64]!r}: {reason}", f"{where}.type")
    return validate_body(source, SOURCES[kind], where)


def _text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedInput(
                f"{where}.{index}.type is {kind[:64]!r}: only text is supported here",
                f"{where}.{index}.type",
            )
        texts.append(validate_body(block, TextBlock, f"{where}.{index}").text)
    return "\n".join(texts)
