"""The class of a model in transformers, and its configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

# Commands of Baton leave it out until a name in it is read, as here (`baton/imports.py`).
from torch._meta_registrations import register_meta  # noqa: F401 - shapes of empty models
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from baton.engine.runner.transformers_models.outline import ModelOutline, UnsupportedModel

ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # as modules of transformers import it


def find_model_class(outline: ModelOutline) -> Any:
    """Return the class of the architecture. Raises UnsupportedModel."""
    name = outline.architecture
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UnsupportedModel(_why_unknown(name, outline))
    found = getattr(transformers, name)
    if found._is_stateful:
        raise UnsupportedModel("its layers keep a state that the KV cache does not hold")
    if not hasattr(sys.modules[found.__module__], ATTENTION_INTERFACE):
        raise UnsupportedModel("its attention does not go through AttentionInterface")
    return found


def _why_unknown(name: str, outline: ModelOutline) -> str:
    if hasattr(transformers, name):
        return "it does not continue texts"
    if json.loads(outline.fields).get("auto_map"):
        return "its code is in its folder (trust_remote_code), and is not run"
    return f"transformers {transformers.__version__} does not have it"


def read_transformers_config(model_class: Any, outline: ModelOutline) -> Any:
    """Return transformers' configuration of a model. Raises UnsupportedModel."""
    try:
        return model_class.config_class.from_dict(json.loads(outline.fields))
    except Exception as error:  # any that a class of transformers raises
        raise UnsupportedModel(
            f"transformers refuses its config.json: {one_line(error)}"
        ) from error


def make_empty_model(model_class: Any, config: Any, attention: str) -> Any:
    """Make a model whose tensors have shapes but no numbers. Raises UnsupportedModel."""
    try:
        with torch.device("meta"):
            # Experts are chosen by numbers: this implementation computes without reading them.
            model = model_class._from_config(
                config, attn_implementation=attention, experts_implementation="batched_mm"
            )
    except Exception as error:  # any that a class of transformers raises
        raise UnsupportedModel(f"transformers cannot make it: {one_line(error)}") from error
    return model.eval()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and reports of transformers out of the log while a model is loaded."""
    logging = transformers.utils.logging
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
