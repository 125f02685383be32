"""Texts in files that clients send, and PDFs among them."""

from __future__ import annotations

import base64
import codecs

import pytest

from baton.router.documents.document import text_of_file
from baton.router.parts import DocumentFile
from baton.rpc.errors import UnsupportedInput

TEXT = "Größe: 7 µm,\tok\r\n中 😀\x1b[0m"


def read(data: bytes, media_type: str = "") -> str | None:
    return text_of_file(DocumentFile("f", data, "a.csv", media_type=media_type))


@pytest.mark.parametrize(
    "data",
    [
        TEXT.encode(),
        TEXT.encode("utf-8-sig"),
        codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    ],
)
def test_texts_are_decoded_whatever_their_type(data: bytes) -> None:
    assert read(data, "application/octet-stream") == TEXT


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n\0", "an image"),
        (b"PK\x03\x04\x14\0", "an archive, such as an Office document"),
        (b"\x7fELF\x02", "neither text in UTF-8 nor a PDF"),
        (b"caf\xe9", "neither text in UTF-8 nor a PDF"),
        (base64.b64decode("AAEC"), "neither text in UTF-8 nor a PDF"),
        (codecs.BOM_UTF16_LE + b"\0", "neither text in UTF-8 nor a PDF"),
    ],
)
def test_other_files_are_refused_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(UnsupportedInput, match=f"^input.0: report.x is {reason}") as refusal:
        text_of_file(DocumentFile("input.0", data, "report.x", media_type="text/plain"))
    assert refusal.value.field == "input.0"


def test_a_pdf_is_known_by_its_mark_or_its_type() -> None:
    for data, media_type in ((b"\n%PDF-1.4", "text/plain"), (b"no PDF", "application/pdf")):
        assert read(data, media_type) is None
    late = b"From: a scanner\n%PDF-1.4\n"
    for data in (late + b"\xe2\xe3\xcf\xd3", late + b"startxref\n9\n%%EOF\n"):
        assert read(data) is None


@pytest.mark.parametrize(
    "text",
    [
        "The first bytes of a PDF are `%PDF-`, and a version.",
        "%PDF- is the mark of a PDF.",
        "A PDF begins with %PDF-1.7, and its last lines are `startxref`, a number and `%%EOF`.",
    ],
)
def test_a_text_about_pdfs_is_a_text(text: str) -> None:
    assert read(text.encode()) == text
