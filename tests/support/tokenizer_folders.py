"""Changes of the tokenizer in a model folder."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing


def copy_with_settings(folder: Path, at: Path, **changes: object) -> Path:
    """Copy the folder with changes to tokenizer_config.json."""
    for path in folder.iterdir():
        (at / path.name).write_bytes(path.read_bytes())
    settings = json.loads((at / "tokenizer_config.json").read_text(encoding="utf-8"))
    (at / "tokenizer_config.json").write_text(json.dumps({**settings, **changes}))
    return at


def put_begin_token_first(folder: Path) -> None:
    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast.save(str(folder / "tokenizer.json"))
