"""Strict tools of tests, calls of them, and tokenizers with and without marks as tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizerFile

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.tokenizer import Tokenizer
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from baton.router.text_events.table import TOOL_FORMATS
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.written_calls import Call

VOCAB_SIZE = 512
# Special tokens inside of marks; Qwen's tags of parameters are none.
TOKEN = re.compile(
    r'<\|"\|>|<\|[^<>|]+\|?>|<[^<>|]+\|>|｜DSML｜|<(?!/?(?:function|parameter))[^<>|｜]+>'
    r"|<｜tool[^<>]*｜>|\[[A-Z_]+\]"
)
SEE: Any = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grey"]},
        "age": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "at": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["colour", "age"],
    "additionalProperties": False,
}
FUNCTIONS = (("see", SEE), ("feed", {"type": "object"}))
RED: Call = ("see", {"colour": "red", "age": 3})
FULL: Call = ("see", {"colour": "grey", "age": 1, "note": "a <b> {c}\nd", "at": [True, False]})
FEED: Call = ("feed", {"any": ["thing"]})


def mark_tokens() -> list[str]:
    """Return the special tokens that the marks of all formats consist of."""
    marks = [mark for each in TOOL_FORMATS.values() for mark in each.marks]
    tokens = {token for mark in marks for token in TOKEN.findall(mark)}
    return sorted(tokens | {"<｜tool▁sep｜>", "<｜tool▁call▁end｜>"})


def load(folder: Path, *marks: str) -> tuple[Tokenizer, GrammarLibrary]:
    """Return a small tokenizer with these tokens."""
    save_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = TokenizerFile.from_file(path)
    for mark in marks:  # tags are not marked as special, as in the tokenizers of Qwen and GLM
        tokenizer.add_tokens([AddedToken(mark, special="|" in mark or "[" in mark)])
    tokenizer.save(path)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    library = GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))
    return load_tokenizer(folder), library
