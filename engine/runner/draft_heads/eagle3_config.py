"""Configuration of an EAGLE-3 head: a decoder layer that drafts from a model's hidden states.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError
from baton.engine.runner.families.read_config import read_config_of
from baton.engine.runner.model.config import ModelConfig

NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
IN_SPECULATORS = "speculators_model_type"  # only folders of that library have this field
# Layers whose inputs a head reads unless it names others: near the start, the middle and the end.
MIN_TAPPED_LAYERS = 6


@dataclass(frozen=True, slots=True)
class HeadConfig:
    model: ModelConfig  # of the one layer
    taps: tuple[int, ...]  # layers of the target whose inputs the head reads
    target_size: int  # of the target's hidden states
    num_draft_tokens: int  # that it can draft: a part of the vocabulary
    norms_all_taps: bool  # one norm of the joined taps
    norms_each_tap: bool
    adds_normed: bool  # the layer adds its outputs to its normed input
    feeds_back_normed: bool  # its next step gets the output after the final norm


def read_head_config(checkpoint: Checkpoint, target: ModelConfig) -> HeadConfig:
    """Raises ModelError if the folder has no such head, or one that does not fit the target."""
    raw = checkpoint.read_config()
    is_wrapped = raw.has(IN_SPECULATORS)
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else raw.get(IN_SPECULATORS)
    if name not in NAMES and raw.get(IN_SPECULATORS) != "eagle3":
        raise raw.wrong("architectures", f"must name an EAGLE-3 head: one of {', '.join(NAMES)}")
    fields = raw.inner("transformer_layer_config") if is_wrapped else raw
    model = _read_model(fields)
    eagle = raw.inner("eagle_config") if raw.has("eagle_config") else raw
    config = HeadConfig(
        model=model,
        taps=_read_taps(raw, eagle, target),
        target_size=raw.positive_int("target_hidden_size", model.hidden_size),
        num_draft_tokens=raw.positive_int("draft_vocab_size", model.vocab_size),
        norms_all_taps=eagle.flag("norm_before_fc", raw.flag("norm_before_fc", False)),
        norms_each_tap=raw.flag("fc_norm", False),
        adds_normed=raw.flag("norm_before_residual", is_wrapped),
        feeds_back_normed=raw.flag("norm_output", False),
    )
    if not eagle.flag("use_aux_hidden_state", True):
        raise eagle.wrong("use_aux_hidden_state", "must be true: other heads are not supported")
    _check_fit(config, target, fields)
    return config


def _read_model(fields: JsonFields) -> ModelConfig:
    plain = fields.with_fields({"architectures": ["LlamaForCausalLM"]})
    if fields.positive_int("num_hidden_layers", 1) != 1:
        raise fields.wrong("num_hidden_layers", "must be 1: heads of several layers are unknown")
    return read_config_of("LlamaForCausalLM", plain.with_defaults({"num_hidden_layers": 1}))


def _read_taps(raw: JsonFields, eagle: JsonFields, target: ModelConfig) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    found = next((each for each in (raw, eagle) if each.has(name)), None)
    if found is None:
        if target.num_layers < MIN_TAPPED_LAYERS:
            raise ModelError(
                f"{raw.where}: {name!r} is missing, and the model has only {target.num_layers} "
                "layers: name those whose inputs the head reads"
            )
        return (2, target.num_layers // 2, target.num_layers - 3)
    taps = tuple(int(number) for number in found.numbers(name))
    if not taps or not all(0 <= tap < target.num_layers for tap in taps):
        raise found.wrong(name, f"must name layers from 0 to {target.num_layers - 1} of the model")
    return taps


def _check_fit(config: HeadConfig, target: ModelConfig, fields: JsonFields) -> None:
    """Refuse heads of other models."""
    model = config.model
    wanted = {
        "vocab_size": (model.vocab_size, target.vocab_size),
        "target_hidden_size": (config.target_size, target.hidden_size),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ModelError(
                f"{fields.where}: {name} is {found}, but that of {target.architecture} is "
                f"{expected}: this head does not fit the model"
            )
    if target.latent is not None:
        raise ModelError(f"{fields.where}: heads for models with latent attention are unsupported")
