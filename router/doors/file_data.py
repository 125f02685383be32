"""Bytes of files in JSON: base64, and `data:` URLs. Pure."""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

from baton.core.errors import InvalidRequest

DATA_URL = "data:"
MAX_LENIENT_CHARACTERS = 1 << 16  # of percent-encoded text in which not all % are escapes


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
