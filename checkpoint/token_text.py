"""Text and bytes of a single token, which may be part of a character. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character


class TokenText(NamedTuple):
    text: str
    raw: bytes  # concatenated over several tokens, the UTF-8 text of all


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet: bytes without a visible character map to code points from 256."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    remapped = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in visible}, **remapped}


BYTE_OF_CHARACTER = _byte_of_character()


def spelled(name: str, text: str) -> TokenText:
    """Return text and bytes of a vocabulary entry `name` that alone decodes to `text`."""
    byte_token = BYTE_TOKEN.fullmatch(name)
    if byte_token is not None:
        return TokenText(text, bytes([int(byte_token[1], 16)]))
    if UNFINISHED in text and all(character in BYTE_OF_CHARACTER for character in name):
        return TokenText(text, bytes(BYTE_OF_CHARACTER[character] for character in name))
    if SPACE in name:
        text = name.replace(SPACE, " ")  # decoders strip the leading space of a text
    return TokenText(text, text.encode())
