"""Pre-tokenizers of byte-level BPE, by the names that GGUF has for them.

They split a text into words, within which BPE merges. Each is a list of steps in the form of
tokenizer.json; the bytes are mapped to characters after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
BEFORE_LETTERS = r"[^\r\n\p{L}\p{N}]?"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
PUNCTUATION_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _words(digits: str) -> str:
    """Words of letters with what precedes them, and numbers of so many digits."""
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{PUNCTUATION}|{SPACES}"


def _cased(digits: str, end: str = "") -> str:
    """Words that begin at a capital letter."""
    words = (f"{BEFORE_LETTERS}[{UPPER}]*[{LOWER}]+", f"{BEFORE_LETTERS}[{UPPER}]+[{LOWER}]*")
    cased = "|".join(f"{word}{end}" for word in words)
    return f"{cased}|{digits}|{PUNCTUATION_OR_SLASH}|{SPACES}"


Step = Mapping[str, object]


def _split(pattern: str) -> Step:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    steps: tuple[Step, ...]
    ignores_merges: bool = False  # a word that is a token is not merged from parts
    is_nfc: bool = False  # the text is normalised first
    adds_bos: bool = False  # unless the metadata says otherwise


SINGLE_DIGITS: Step = {"type": "Digits", "individual_digits": True}
ONE_TO_THREE = r"\p{N}{1,3}"
LLAMA3 = PreTokenizer((_split(_words(ONE_TO_THREE)),), ignores_merges=True, adds_bos=True)
QWEN2 = PreTokenizer((_split(_words(r"\p{N}")),), is_nfc=True)
DIGITS_AND_GPT2 = PreTokenizer((SINGLE_DIGITS, _split(GPT2)))
PLAIN_GPT2 = PreTokenizer((_split(GPT2),))
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PLAIN_GPT2,
    "gpt-2": PLAIN_GPT2,
    "olmo": PLAIN_GPT2,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "smaug-bpe": PreTokenizer((_split(_words(ONE_TO_THREE)),)),
    "dbrx": PreTokenizer((_split(_words(ONE_TO_THREE)),)),
    "chatglm-bpe": PreTokenizer((_split(_words(ONE_TO_THREE)),)),
    "glm4": PreTokenizer((_split(_words(ONE_TO_THREE)),)),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "smollm": DIGITS_AND_GPT2,
    "starcoder": DIGITS_AND_GPT2,
    "refact": DIGITS_AND_GPT2,
    "command-r": DIGITS_AND_GPT2,
    "tekken": PreTokenizer((_split(_cased(r"\p{N}")),), ignores_merges=True),
    "gpt-4o": PreTokenizer((_split(_cased(ONE_TO_THREE, f"{CONTRACTIONS}?")),)),
    "llama4": PreTokenizer((_split(_cased(ONE_TO_THREE, f"{CONTRACTIONS}?")),)),
}
