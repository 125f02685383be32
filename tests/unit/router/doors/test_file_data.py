"""Bytes of files that clients send in JSON, and their names."""

from __future__ import annotations

import base64
import tracemalloc
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.router.doors.file_data import MAX_LENIENT_CHARACTERS, read_data
from baton.router.doors.openai.request.files import FileBody, document_of_file


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
