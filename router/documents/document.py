"""Documents that clients send in messages, and their form in a prompt. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.router.documents.encodings import decode_text, read_text

PDF = "application/pdf"
PDF_MARK, PDF_END = re.compile(rb"%PDF-\d"), re.compile(rb"startxref\s+\d+\s+%%EOF")
MAX_MARK_OFFSET = 1024  # other bytes may come before the mark, and after the end
MAX_DOCUMENTS = 64  # of one request


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a message, with the field that has it."""

    content: str | bytes  # bytes: a PDF
    where: str
    name: str = ""
    context: str = ""  # what the client says about it

    @property
    def label(self) -> str:
        return label_of(self.name, self.where)


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A document and its place in a request's body."""

    document: Document
    parts: list[Any]  # of the message
    index: int
    text_part: dict[str, Any]  # what takes its place, without the text
    warnings: tuple[str, ...] = ()

    def put_text(self, text: str) -> None:
        self.parts[self.index] = {**self.text_part, "text": prompt_text(self.document, text)}


def document_from(
    data: bytes, where: str, name: str, media_type: str = "", context: str = ""
) -> Document:
    """Return the document in a file, whose type is what it contains, or what the client says.

    Raises UnsupportedInput for anything but a PDF or text.
    """
    if media_type == PDF or _is_pdf(data):
        return Document(data, where, name, context)
    return Document(read_text(data, label_of(name, where), where), where, name, context)


def _is_pdf(data: bytes) -> bool:
    """True if the data is a PDF, rather than a text that has its mark."""
    head = data[:MAX_MARK_OFFSET].lstrip()
    if PDF_MARK.search(head) is None:
        return False
    has_end = PDF_END.search(data[-MAX_MARK_OFFSET:]) is not None
    return PDF_MARK.match(head) is not None or has_end or decode_text(data) is None


def label_of(name: str, where: str) -> str:
    """Return field and name of a document, for errors and warnings."""
    return f"{where}: {name or 'the file'}"


def prompt_text(document: Document, text: str) -> str:
    """Return the text of a document as the model sees it."""
    title = f"File {document.name}:" if document.name else "File:"
    context = f"\n{document.context}" if document.context else ""
    return f"{title}{context}\n\n{text}"


def parts_of_kind(
    content: object, kind: str, where: str
) -> Iterator[tuple[str, list[Any], int, dict[str, Any]]]:
    """Yield field, list, index and part, for each part of a message that is of this kind."""
    if not isinstance(content, list):
        return
    for index, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") == kind:
            yield f"{where}.{index}", content, index, part
