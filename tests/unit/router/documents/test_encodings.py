"""Bytes of files that clients send, as text."""

from __future__ import annotations

import base64
import codecs
import tracemalloc
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.router.documents.document import MAX_LENIENT_CHARACTERS, document_from, read_data
from baton.router.doors.openai.request.files import FileBody, document_of_file
from baton.rpc.errors import UnsupportedInput

TEXT = "Größe: 7 µm,\tok\r\n中 😀\x1b[0m"


@pytest.mark.parametrize(
    ("sent", "content", "media_type"),
    [
        ("aGk=", b"hi", ""),
        (" aG\nk= ", b"hi", ""),
        ("", b"", ""),
        ("data:text/plain;base64,aGk=", b"hi", "text/plain"),
        ("DATA:Text/CSV; charset=utf-8 ;BASE64,aGk=", b"hi", "text/csv"),
        ("data:,a%20b", b"a b", ""),
        ("data:text/plain,", b"", "text/plain"),
    ],
)
def test_data_urls_and_base64_are_read(sent: str, content: bytes, media_type: str) -> None:
    assert read_data(sent, "file_data") == (content, media_type)


@given(texts=st.lists(st.sampled_from(["%", "%41", "%4", "%3D", "=", "é", "\r\n"]), max_size=12))
def test_percent_encoding_is_decoded_as_by_browsers(texts: list[str]) -> None:
    text = "".join(texts)

    assert read_data(f"data:,{text}", "file_data")[0] == unquote_to_bytes(text)


def test_a_long_text_must_be_percent_encoded_throughout() -> None:
    text = "é%20=" * MAX_LENIENT_CHARACTERS

    assert read_data(f"data:,{text}", "file_data")[0] == unquote_to_bytes(text)
    for wrong in ("%", "%4", "%\n", "%%41", "%\r"):
        with pytest.raises(InvalidRequest, match=r"^file_data has a % without two hex"):
            read_data(f"data:,{text}{wrong}{text}", "file_data")


def test_percent_encoding_is_decoded_in_little_memory() -> None:
    text = "data:," + "%41=" * (1 << 18)
    tracemalloc.start()
    try:
        read_data(text, "file_data")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 12 * len(text)


@pytest.mark.parametrize("sent", ["aGk", "a_k=", "aGk=é", "data:text/plain;base64,?", "data:aGk="])
def test_other_data_is_refused_by_name(sent: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^file_data is (not base64|a data: URL without)"):
        read_data(sent, "file_data")


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
    assert document_from(data, "f", "a.csv", "application/octet-stream").content == TEXT


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
        document_from(data, "input.0", "report.x", "text/plain")
    assert refusal.value.field == "input.0"


def test_a_pdf_is_known_by_its_mark_or_its_type() -> None:
    for data, media_type in ((b"\n%PDF-1.4", "text/plain"), (b"no PDF", "application/pdf")):
        assert document_from(data, "f", "", media_type).content == data
    late = b"From: a scanner\n%PDF-1.4\n"
    for data in (late + b"\xe2\xe3\xcf\xd3", late + b"startxref\n9\n%%EOF\n"):
        assert document_from(data, "f", "", "").content == data


@pytest.mark.parametrize(
    "text",
    [
        "The first bytes of a PDF are `%PDF-`, and a version.",
        "%PDF- is the mark of a PDF.",
        "A PDF begins with %PDF-1.7, and its last lines are `startxref`, a number and `%%EOF`.",
    ],
)
def test_a_text_about_pdfs_is_a_text(text: str) -> None:
    assert document_from(text.encode(), "f", "notes.md", "").content == text


@pytest.mark.parametrize(
    "name",
    [
        "Screenshot 9.41\u202fAM.txt",
        "Capture\u00a0d\u2019écran.txt",
        "\U0001f469\u200d\U0001f4bb.txt",
    ],
)
def test_names_have_spaces_and_emoji_of_any_kind(name: str) -> None:
    file = FileBody(filename=name, file_data=base64.b64encode(b"hi").decode())

    assert document_of_file(file, file.file_data, "f", "file_data").name == name


@pytest.mark.parametrize("name", ["a\nb", "a\u202eb", "a\u2028b", "a\0b", "a" * 300])
def test_names_that_break_lines_or_turn_them_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^f\.filename"):
        document_of_file(FileBody(filename=name), "", "f", "file_data")
