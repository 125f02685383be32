"""The class of a model in transformers, its configuration, and its decoder and head apart."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
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


@dataclass(frozen=True, slots=True)
class SplitModel:
    """Decoder and head. Scales and caps of logits are in the forward pass of the whole model.

    The head is therefore a copy of the whole in which a module that returns its input replaces the
    decoder. Both share their weights.
    """

    whole: Any
    decoder: Any
    head: Any

    def hidden_states(self, token_ids: Tensor, positions: Tensor, **others: Any) -> Any:
        """[tokens] → output of the decoder, whose hidden states are [1, tokens, hidden_size]."""
        return self.decoder(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **others
        )

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size]."""
        logits: Tensor = self.head(inputs_embeds=hidden_states[None], use_cache=False).logits
        return logits[0]


class _GivenStates(nn.Module):
    """Returns hidden states that are given as embeddings of the input."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_others: Any) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


def decoder_of(whole: Any) -> Any:
    """Return the module between token ids and the head."""
    return whole.base_model.get_decoder()


def split_model(whole: Any, output: type) -> SplitModel:
    """Split a model whose decoder returns this class of outputs. Raises UnsupportedModel."""
    decoder = decoder_of(whole)
    path = next((name for name, module in whole.named_modules() if module is decoder), "")
    if not path or "last_hidden_state" not in getattr(output, "__dataclass_fields__", ()):
        raise UnsupportedModel("its decoder is not a module apart from its head")
    return SplitModel(whole, decoder, _replaced(whole, path.split("."), _GivenStates(output)))


def _replaced(module: nn.Module, path: Sequence[str], replacement: nn.Module) -> nn.Module:
    """Return a copy of a module, with the same parts but one."""
    copied, (name, *rest) = copy.copy(module), path
    part = module._modules[name]
    assert part is not None
    copied._modules = {
        **module._modules,
        name: _replaced(part, rest, replacement) if rest else replacement,
    }
    return copied
