"""Incremental detokenization: the joined pieces equal the decoded whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from baton.checkpoint.tokenizer import Tokenizer
from tests.support.models import save_tokenizer
from tests.unit.checkpoint.test_tokenizer import metaspace_tokenizer

SPECIAL = (1, 2)
FIRST_BYTE = 6


def join_bytes(token_ids: list[int]) -> list[int]:
    """Drop special tokens that follow a byte.

    Decoded at once, special tokens are dropped first, and the bytes around them are read together.
    """
    kept: list[int] = []
    for token in token_ids:
        if token not in SPECIAL or not kept or kept[-1] < FIRST_BYTE:
            kept.append(token)
    return kept


# Words, and single bytes that sometimes form whole characters.
TOKENS = st.lists(st.integers(0, 261), max_size=40).map(join_bytes)


@cache
def byte_level_tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        fast = FastTokenizer.from_file(f"{folder}/tokenizer.json")
    return Tokenizer(fast, named_tokens={}, chat_templates={})


@cache
def word_tokenizer() -> Tokenizer:
    return metaspace_tokenizer()


@pytest.mark.parametrize("make", [byte_level_tokenizer, word_tokenizer])
@given(token_ids=TOKENS, sizes=st.lists(st.integers(1, 4), min_size=40, max_size=40))
def test_joined_chunks_equal_the_decoded_text(
    make: object, token_ids: list[int], sizes: list[int]
) -> None:
    assert callable(make)
    tokenizer: Tokenizer = make()
    detokenizer = tokenizer.detokenizer()

    pieces, rest = [], token_ids
    for size in sizes:
        pieces.append(detokenizer.push(*rest[:size]))
        rest = rest[size:]

    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(token_ids)


@given(text=st.text(max_size=60))
def test_encoded_text_round_trips_without_broken_characters(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    detokenizer = tokenizer.detokenizer()

    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]

    assert "".join(pieces) + detokenizer.finish() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
