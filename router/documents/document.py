"""Documents in files: PDFs, and texts with their encodings. Pure."""

from __future__ import annotations

import codecs
import re
from contextlib import suppress

from baton.router.parts import DocumentFile
from baton.rpc.errors import UnsupportedInput

PDF = "application/pdf"
PDF_MARK, PDF_END = re.compile(rb"%PDF-\d"), re.compile(rb"startxref\s+\d+\s+%%EOF")
MAX_MARK_OFFSET = 1024  # other bytes may come before the mark, and after the end
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Beginnings of files that clients often send, and what these are.
BINARY_MARKS = {
    b"\x89PNG": "an image: a document is a PDF or a text",
    b"\xff\xd8\xff": "an image: a document is a PDF or a text",
    b"GIF8": "an image: a document is a PDF or a text",
    b"RIFF": "an image, audio or video: a document is a PDF or a text",
    b"PK\x03\x04": "an archive, such as an Office document: send a PDF, or its text",
    b"\xd0\xcf\x11\xe0": "an Office document: send a PDF, or its text",
    b"\x1f\x8b": "compressed: send the file itself",
}
# Control characters other than whitespace, backspace and escape, which texts do not have.
BINARY = re.compile("[\0-\x07\x0e-\x1a\x1c-\x1f]")


def text_of_file(file: DocumentFile) -> str | None:
    """Return the text in a file; None if it is a PDF, by its content or as the client says.

    Raises UnsupportedInput for anything else.
    """
    if file.media_type == PDF or _is_pdf(file.data):
        return None
    text = _decode(file.data)
    if text is not None:
        return text
    kinds = (kind for mark, kind in BINARY_MARKS.items() if file.data.startswith(mark))
    kind = next(kinds, "neither text in UTF-8 nor a PDF: send it as one of these")
    raise UnsupportedInput(f"{file.label} is {kind}", file.where)


def _is_pdf(data: bytes) -> bool:
    """True if the data is a PDF, rather than a text that has its mark."""
    head = data[:MAX_MARK_OFFSET].lstrip()
    if PDF_MARK.search(head) is None:
        return False
    has_end = PDF_END.search(data[-MAX_MARK_OFFSET:]) is not None
    return PDF_MARK.match(head) is not None or has_end or _decode(data) is None


def _decode(data: bytes) -> str | None:
    """Return the text in a file, None if it is not text."""
    encoding = "utf-16" if data.startswith(UTF_16_MARKS) else "utf-8-sig"
    with suppress(UnicodeDecodeError):
        text = data.decode(encoding)
        if not BINARY.search(text):
            return text
    return None
