"""SentencePiece tokenizers of GGUF files: bytes, user-defined tokens, spaces, merges by score."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.gguf_tokenizer import load_tokenizer
from baton.checkpoint.tokenizer import Tokenizer
from tests.support.gguf_files import write_pieces

PIECES = ("ab", "▁ab", "▁a", "bc", "a", "b", "c", "abc")  # the best first


def tokenizer_of(
    folder: Path,
    user_defined: tuple[str, ...] = (),
    *,
    add_space_prefix: bool = True,
    merges: tuple[str, ...] = (),
) -> Tokenizer:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_pieces(writer, PIECES, user_defined, add_space_prefix=add_space_prefix, merges=merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(GgufFile.read(path))


def names(tokenizer: Tokenizer, text: str) -> list[str]:
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *PIECES]
    ids = tokenizer.encode(text)
    return [vocabulary[i] if i < len(vocabulary) else f"user {i}" for i in ids]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["<s>", "▁ab"]),
        ("abc", ["<s>", "▁ab", "c"]),  # "ab" is better than "bc"
        ("xab", ["<s>", "▁", "<0x78>", "ab"]),
        ("é🙂", ["<s>", "▁", *(f"<0x{byte:02X}>" for byte in "é🙂".encode())]),
        ("a  b\n", ["<s>", "▁a", "▁", "▁", "b", "<0x0A>"]),
        ("ab</s>a", ["<s>", "▁ab", "</s>", "▁a"]),  # as llama.cpp, a space after a special token
        ("", ["<s>"]),
    ],
)
def test_texts_are_merged_by_score_and_fall_back_to_bytes(
    text: str, expected: list[str], tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path)

    assert names(tokenizer, text) == expected


@pytest.mark.parametrize("text", ["ab", "xab", "é🙂\x00\n", "a  b ", "", "日本"])
@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_texts_come_back(text: str, add_space_prefix: bool, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, add_space_prefix=add_space_prefix)

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_space_before_a_text_is_its_own_without_the_prefix(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, add_space_prefix=False)

    assert names(tokenizer, "ab") == ["<s>", "ab"]
    assert names(tokenizer, " ab") == ["<s>", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_user_defined_tokens_are_found_in_a_text_and_shown(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ("  ", "   ", "<tool>"), add_space_prefix=False)
    first = 3 + 256 + 1 + len(PIECES)

    found = tokenizer.encode("a<tool>     b")

    assert names(tokenizer, "a<tool>     b")[1:] == [
        "a",
        f"user {first + 2}",
        f"user {first + 1}",
        f"user {first}",
        "b",
    ]
    assert tokenizer.decode(found) == "a<tool>     b"


def test_listed_merges_are_used_in_their_order_and_others_are_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, merges=("b c", "▁ a", "a b"))

    assert names(tokenizer, "abc") == ["<s>", "a", "bc"]  # by their scores: "ab" first
    assert names(tokenizer, " ab é") == ["<s>", "▁a", "b", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" ab é")) == " ab é"
