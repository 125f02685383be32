"""Pre-tokenizers of GGUF files: the words of transformers, and what is particular to each."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from baton.checkpoint.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.support.mixed_text import mixed_lines

TEXT = "It's 12345 été, NaïveHTTP 東京한국\n\n \t x=1;"
GPT2 = "It|'s| 12345| été|,| NaïveHTTP| 東京한국|\n\n \t| x|=|1|;"
LLAMA3 = "It|'s| |123|45| été|,| NaïveHTTP| 東京한국|\n\n| \t| x|=|1|;"
QWEN2 = "It|'s| |1|2|3|4|5| été|,| NaïveHTTP| 東京한국|\n\n| \t| x|=|1|;"
WORDS = {
    "gpt-2": GPT2,
    "default": "It|'|s| |123|45| été|,| NaïveHTTP| 東京한국|\n\n \t| x|=|1|;",
    "falcon": "It|'|s| |123|45| été|,| NaïveHTTP| 東京한국|\n\n \t| x|=|1|;",
    "smollm": "It|'s| |1|2|3|4|5| été|,| NaïveHTTP| 東京한국|\n\n \t| x|=|1|;",
    "llama-bpe": LLAMA3,
    "glm4": LLAMA3,
    "minicpm5": LLAMA3,
    "qwen2": QWEN2,
    "qwen35": QWEN2,
    "bailingmoe": QWEN2,
    "seed-coder": QWEN2,
    "tekken": "It|'s| |1|2|3|4|5| été|,| Naïve|HTTP| 東京한국|\n\n| \t| x|=|1|;",
    "gpt-4o": "It's| |123|45| été|,| Naïve|HTTP| 東京한국|\n\n| \t| x|=|1|;",
    "deepseek-llm": "It|'|s| |12345| é|t|é|,| Na|ï|veHTTP| |東京한국|\n|\n| \t| x|=|1|;",
    "deepseek-coder": "It|'|s| |1|2|3|4|5| été|,| NaïveHTTP| |東京한국|\n|\n| \t| x|=|1|;",
    "deepseek-v3": "It|'s| |123|45| été|,| NaïveHTTP| |東京|한국|\n\n| \t| x|=|1|;",
    "exaone-moe": "It|'s| |1|2|3|4|5| été|,| NaïveHTTP 東京한국|\n\n| \t| x|=|1|;",
    "bloom": "It's| 12345| été|,| NaïveHTTP| 東京한국|\n\n \t| x=1;",
    "viking": "It's| |1|2|3|4|5| été|,| NaïveHTTP| 東京한국|\n\n \t| x=|1|;",
}
# Texts in which some of these differ, and their words.
DIFFERENCES = {
    ("qwen2", "a!!\n\nb"): "a|!!\n\n|b",
    ("seed-coder", "a!!\n\nb"): "a|!!|\n\n|b",
    ("bailingmoe", "a\n\n\nb"): "a|\n\n\n|b",
    ("exaone-moe", "a!!\n\nb"): "a|!!\n|\n|b",
    ("qwen2", "क्या"): "क|्य|ा",
    ("qwen35", "क्या"): "क्या",
    ("gpt-4o", "a//\n/b"): "a|//\n/|b",
    ("falcon", "`a`"): "`|a|`",
    ("deepseek-v3", "x.split(y)"): "x|.split|(y|)",
    ("tekken", "don't"): "don|'t",
}


def splitter(name: str) -> PreTokenizer:
    steps = {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[name].steps)}
    empty = json.loads(Tokenizer(BPE()).to_str())
    found: PreTokenizer = Tokenizer.from_str(
        json.dumps({**empty, "pre_tokenizer": steps})
    ).pre_tokenizer
    return found


def words(pre: PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in pre.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        *((name, TEXT, found) for name, found in WORDS.items()),
        *((name, text, found) for (name, text), found in DIFFERENCES.items()),
    ],
)
def test_a_text_has_these_words(name: str, text: str, expected: str) -> None:
    assert words(splitter(name), text) == expected.split("|")


def test_words_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    lines = mixed_lines(300)

    for name, pattern in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        if name in PRE_TOKENIZERS:  # all but those of embedding models
            found, expected = splitter(name), pre_tokenizers.Split(Regex(pattern), "isolated")
            for line in lines:
                assert words(found, line) == words(expected, line), name


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("gpt-2 olmo", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (
            "smollm starcoder refact command-r",
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
    ],
)
def test_words_are_those_of_the_librarys_own_patterns(names: str, expected: PreTokenizer) -> None:
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name in names.split():
        found = pre_tokenizers.Sequence([splitter(name), to_bytes])
        for line in mixed_lines(300):
            assert words(found, line) == words(expected, line), name
