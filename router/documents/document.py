"""Documents in files that clients send. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from baton.router.documents.encodings import decode_text, read_text
from baton.router.parts import Document

PDF = "application/pdf"
PDF_MARK, PDF_END = re.compile(rb"%PDF-\d"), re.compile(rb"startxref\s+\d+\s+%%EOF")
MAX_MARK_OFFSET = 1024  # other bytes may come before the mark, and after the end
MAX_DOCUMENTS = 64  # of one request


def document_from(data: bytes, where: str, name: str, media_type: str = "") -> Document:
    """Return the document in a file, whose type is what it contains, or what the client says.

    Raises UnsupportedInput for anything but a PDF or text.
    """
    document = Document(data, where, name)
    if media_type == PDF or _is_pdf(data):
        return document
    return replace(document, content=read_text(data, document.label, where))


def _is_pdf(data: bytes) -> bool:
    """True if the data is a PDF, rather than a text that has its mark."""
    head = data[:MAX_MARK_OFFSET].lstrip()
    if PDF_MARK.search(head) is None:
        return False
    has_end = PDF_END.search(data[-MAX_MARK_OFFSET:]) is not None
    return PDF_MARK.match(head) is not None or has_end or decode_text(data) is None
