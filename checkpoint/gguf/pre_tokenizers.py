"""Pre-tokenizers of byte-level BPE, by the names that GGUF has for them.

They split a text into words, within which BPE merges. Each is a list of steps in the form of
tokenizer.json; the bytes are mapped to characters after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
BEFORE_LETTERS = r"[^\r\n\p{L}\p{N}]?"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
PUNCTUATION_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
CHINESE_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CHINESE_OR_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
LETTERS = (  # of Latin, Greek, Cyrillic and some other scripts, as DeepSeek lists them
    "A-Za-z\u00b5"
    "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


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
ENDS_OF_SENTENCES = ".,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
BLOOM = rf" ?[^(\s|{ENDS_OF_SENTENCES})]+"
DEEPSEEK_V3 = (
    rf"{ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED = rf"{CONTRACTIONS}|{BEFORE_LETTERS}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
MARKED = (  # with the marks that follow letters
    rf"{CONTRACTIONS}|{BEFORE_LETTERS}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
EXAONE_MOE = (
    rf"{CONTRACTIONS}|{BEFORE_LETTERS}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)

LLAMA3 = PreTokenizer((_split(_words(ONE_TO_THREE)),), ignores_merges=True, adds_bos=True)
QWEN2 = PreTokenizer((_split(_words(r"\p{N}")),), is_nfc=True)
O200K = PreTokenizer((_split(_cased(ONE_TO_THREE, f"{CONTRACTIONS}?")),))
DIGITS_AND_GPT2 = PreTokenizer((SINGLE_DIGITS, _split(GPT2)))
PLAIN_GPT2 = PreTokenizer((_split(GPT2),))
CL100K = PreTokenizer((_split(_words(ONE_TO_THREE)),))
SINGLE_DIGIT_WORDS = PreTokenizer((_split(_words(r"\p{N}")),))
DEEPSEEK3 = PreTokenizer(tuple(map(_split, (ONE_TO_THREE, CHINESE_OR_KANA, DEEPSEEK_V3))))
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    CHINESE_OR_HANGUL,
    r"\p{N}+",
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_OR_HANGUL, r"\p{N}")
# What llama.cpp does with files that do not name one.
UNNAMED = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
FALCON = (r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")

_NAMES: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(tuple(map(_split, UNNAMED))),
    "falcon": PreTokenizer(tuple(map(_split, FALCON))),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4": PLAIN_GPT2,
    "olmo mpt jais trillion granite-docling": PLAIN_GPT2,
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": DIGITS_AND_GPT2,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": LLAMA3,
    "smaug-bpe dbrx chatglm-bpe": CL100K,
    "glm4 glm5": replace(CL100K, ignores_merges=True),
    "qwen2 deepseek-r1-qwen megrez": QWEN2,
    "stablelm2 kormo f2llmv2 hunyuan solar-open grok-2": SINGLE_DIGIT_WORDS,
    "qwen35": PreTokenizer((_split(MARKED),), is_nfc=True),
    "tekken": PreTokenizer((_split(_cased(r"\p{N}")),), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": O200K,
    "deepseek-llm": PreTokenizer(tuple(map(_split, DEEPSEEK_LLM))),
    "deepseek-coder": PreTokenizer(tuple(map(_split, DEEPSEEK_CODER))),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": DEEPSEEK3,
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_split(BAILING),)),
    "seed-coder": PreTokenizer((_split(SEED),)),
    "exaone-moe": PreTokenizer((_split(EXAONE_MOE),)),
    "minicpm5": PreTokenizer(
        (_split(ONE_TO_THREE), _split(_words(r"\p{N}+"))), ignores_merges=True
    ),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_split(BLOOM),)),
    "viking": PreTokenizer((_split(BLOOM), _split(r"\p{N}"))),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: pre for names, pre in _NAMES.items() for name in names.split()
}
