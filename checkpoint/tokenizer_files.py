"""Loads a tokenizer from the files of a model folder."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from baton.checkpoint.json_fields import JsonFields, read_model_text
from baton.checkpoint.model_files import (
    read_chat_templates,
    read_generation_defaults,
    read_tokenizer_config,
)
from baton.checkpoint.tokenizer import Clock, Tokenizer
from baton.core.errors import ModelError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_tokenizer(folder: Path, *, clock: Clock = datetime.now) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises ModelError, which names the faulty file."""
    return Tokenizer(
        _load_fast(folder),
        named_tokens=_named_tokens(read_tokenizer_config(folder)),
        chat_templates=read_chat_templates(folder),
        eos_token_ids=read_generation_defaults(folder).eos_token_ids,
        clock=clock,
    )


def _named_tokens(settings: JsonFields) -> dict[str, str]:
    named = {}
    for name in NAMED_TOKENS:
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[name] = content
    return named


def _load_fast(folder: Path) -> FastTokenizer:
    """Load tokenizer.json. It defines where BOS and EOS go; legacy flags are ignored."""
    path = folder / "tokenizer.json"
    if not path.exists() and not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} is not a model folder: it has no config.json and no tokenizer.json"
        )
    if not path.exists():
        raise ModelError(f"{path} is missing; save the tokenizer in the fast format")
    try:
        fast = FastTokenizer.from_str(read_model_text(path))
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error
    fast.no_truncation()
    fast.no_padding()
    return fast
