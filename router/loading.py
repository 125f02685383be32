"""Loads the tokenizers of a router's models."""

from __future__ import annotations

import logging
from dataclasses import replace

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.hub import model_root, open_checkpoint, served_name
from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import InvalidConfig, ModelError
from baton.core.sampling import MAX_END_TOKENS
from baton.router.input_processing.model_profiles import ModelProfile
from baton.router.input_processing.tokenization import ModelText
from baton.router.model_options import ByName, ModelOptions
from baton.router.pictures.formats import find_format
from baton.router.pictures.plan import PictureFormat
from baton.router.text_events.table import REASONING_FORMATS
from baton.router.values import Parsing, ReasoningTokens

log = logging.getLogger(__name__)


def load_profiles(options: ModelOptions) -> list[ModelProfile]:
    """Load the profile of each model. Raises InvalidConfig if two have the same name."""
    names = [_name_of(model) for model in options.folders]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfig(f"--model: two models have the name {name!r}; give NAME=FOLDER")
    _check_known(options, names)
    return [_load(options, model, name) for name, model in zip(names, options.folders, strict=True)]


def _load(options: ModelOptions, model: ByName, name: str) -> ModelProfile:
    mmproj = options.mmproj if model is options.folders[0] else ""
    checkpoint = open_checkpoint(model.value, mmproj=mmproj)
    tokenizer, images = checkpoint.load_tokenizer(), _read_format(checkpoint)
    parsing = options.parsing_of(name, tokenizer.chat_template)
    tokens = _reasoning_tokens(parsing, tokenizer)
    return ModelProfile(
        ModelText(tokenizer, images),
        name,
        is_name_assumed=not model.name,
        parsing=replace(parsing, reasoning_tokens=tokens),
        images=images,
        root=model_root(model.value),
    )


def _read_format(checkpoint: Checkpoint) -> PictureFormat | None:
    """Return how the model takes images; None if it takes text alone, or in a way not known."""
    try:
        return find_format(checkpoint)
    except ModelError as error:
        log.warning("images are refused, but text is served: %s", error)
        return None


def _reasoning_tokens(parsing: Parsing, tokenizer: Tokenizer) -> ReasoningTokens | None:
    """Return the tokens of the reasoning marks, None if the tokenizer has none for them."""
    marks = REASONING_FORMATS.get(parsing.reasoning)
    if marks is None:
        return None
    begin, end = tokenizer.encode_mark(marks.begin), tokenizer.encode_mark(marks.end)
    if not begin or not 0 < len(end) <= MAX_END_TOKENS:
        return None
    return ReasoningTokens(marks, begin[0], end)


def _name_of(model: ByName) -> str:
    return model.name or served_name(model.value)


def _check_known(options: ModelOptions, names: list[str]) -> None:
    for parser in (*options.tool_parsers, *options.reasoning_parsers):
        if parser.name and parser.name not in names:
            raise InvalidConfig(
                f"{parser.name}={parser.value}: no --model has the name {parser.name!r}; "
                f"there are: {', '.join(names) or 'none'}"
            )
