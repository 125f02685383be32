"""Documents in files that clients send: their bytes and the encodings of texts. Pure."""

from __future__ import annotations

import binascii
import codecs
import re
from contextlib import suppress
from dataclasses import replace
from urllib.parse import unquote_to_bytes

from baton.core.errors import InvalidRequest
from baton.router.values import Document
from baton.rpc.errors import UnsupportedInput

PDF = "application/pdf"
PDF_MARK, PDF_END = re.compile(rb"%PDF-\d"), re.compile(rb"startxref\s+\d+\s+%%EOF")
MAX_MARK_OFFSET = 1024  # other bytes may come before the mark, and after the end
MAX_DOCUMENTS = 64  # of one request
DATA_URL = "data:"
MAX_LENIENT_CHARACTERS = 1 << 16  # of percent-encoded text in which not all % are escapes
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


def read_base64(text: str, where: str) -> bytes:
    """Raises InvalidRequest."""
    try:
        return binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except ValueError:  # also of characters that are not ASCII
        raise InvalidRequest(
            f"{where} is not base64: send the bytes of the file in base64", where
        ) from None


def read_data(text: str, where: str) -> tuple[bytes, str]:
    """Return bytes and media type of a `data:` URL, or of plain base64, whose type is not known.

    Raises InvalidRequest.
    """
    if text[: len(DATA_URL)].lower() != DATA_URL:
        return read_base64(text, where), ""
    header, comma, body = text[len(DATA_URL) :].partition(",")
    if not comma:
        raise InvalidRequest(
            f"{where} is a data: URL without a comma: send data:TYPE;base64,DATA", where
        )
    media_type, *parameters = [part.strip().lower() for part in header.split(";")]
    if "base64" in parameters:
        return read_base64(body, where), media_type
    return _unquoted(body, where), media_type


def _unquoted(text: str, where: str) -> bytes:
    """Decode percent-encoding as quoted-printable, which takes no object for each escape."""
    escaped = text.encode().replace(b"=", b"%3D")
    data = binascii.a2b_qp(escaped.replace(b"%", b"="))
    has_breaks = b"%\n" in escaped or b"%\r" in escaped  # of lines, in quoted-printable alone
    if not has_breaks and len(escaped) - len(data) == 2 * escaped.count(b"%"):
        return data
    if len(text) > MAX_LENIENT_CHARACTERS:
        raise InvalidRequest(
            f"{where} has a % without two hexadecimal digits: send it as %25, or use base64", where
        )
    return unquote_to_bytes(text)


def decode_text(data: bytes) -> str | None:
    """Return the text in a file, None if it is not text."""
    encoding = "utf-16" if data.startswith(UTF_16_MARKS) else "utf-8-sig"
    with suppress(UnicodeDecodeError):
        text = data.decode(encoding)
        if not BINARY.search(text):
            return text
    return None


def read_text(data: bytes, label: str, where: str) -> str:
    """Decode the text of a file. Raises UnsupportedInput for anything but text."""
    text = decode_text(data)
    if text is not None:
        return text
    kinds = (kind for mark, kind in BINARY_MARKS.items() if data.startswith(mark))
    kind = next(kinds, "neither text in UTF-8 nor a PDF: send it as one of these")
    raise UnsupportedInput(f"{label} is {kind}", where)
