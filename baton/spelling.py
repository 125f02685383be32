"""What one token stands for: its text, and its bytes where it is less than a character. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TokenText(NamedTuple):
    text: str
    raw: bytes  # those of several tokens, joined, are the text of all


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: each byte that is no visible character is written as one beyond 255."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in visible)
    written = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in visible}, **written}


BYTE_OF_CHARACTER = _byte_of_character()


def spelled(name: str, text: str) -> TokenText:
    """A token of this name in the vocabulary, that decodes to this text when it is alone."""
    alone = BYTE_TOKEN.fullmatch(name)
    if alone is not None:
        return TokenText(text, bytes([int(alone[1], 16)]))
    if UNFINISHED in text and all(character in BYTE_OF_CHARACTER for character in name):
        return TokenText(text, bytes(BYTE_OF_CHARACTER[character] for character in name))
    if SPACE in name:
        text = name.replace(SPACE, " ")  # decoders take away the space that begins a text
    return TokenText(text, text.encode())
