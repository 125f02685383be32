"""Loads the tokenizers of a router's models."""

from __future__ import annotations

from baton.checkpoint.hub import model_root, open_checkpoint, served_name
from baton.core.errors import InvalidConfig
from baton.router.input_processing.model_profiles import ModelProfile
from baton.router.input_processing.tokenization import ModelText
from baton.router.model_options import ByName, ModelOptions


def load_profiles(options: ModelOptions) -> list[ModelProfile]:
    """Load the profile of each model. Raises InvalidConfig if two have the same name."""
    names = [_name_of(model) for model in options.folders]
    for name in names:
        if names.count(name) > 1:
            raise InvalidConfig(f"--model: two models have the name {name!r}; give NAME=FOLDER")
    _check_known(options, names)
    return [_load(options, model, name) for name, model in zip(names, options.folders, strict=True)]


def _load(options: ModelOptions, model: ByName, name: str) -> ModelProfile:
    tokenizer = open_checkpoint(model.value).load_tokenizer()
    return ModelProfile(
        ModelText(tokenizer),
        name,
        is_name_assumed=not model.name,
        parsing=options.parsing_of(name, tokenizer.chat_template),
        root=model_root(model.value),
    )


def _name_of(model: ByName) -> str:
    return model.name or served_name(model.value)


def _check_known(options: ModelOptions, names: list[str]) -> None:
    for parser in (*options.tool_parsers, *options.reasoning_parsers):
        if parser.name and parser.name not in names:
            raise InvalidConfig(
                f"{parser.name}={parser.value}: no --model has the name {parser.name!r}; "
                f"there are: {', '.join(names) or 'none'}"
            )
