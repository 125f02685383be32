"""Configuration of an EAGLE head: a decoder layer that drafts from a model's hidden states.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError
from baton.engine.runner.families.read_config import read_config_of
from baton.engine.runner.model.config import ModelConfig

# Names of architectures, by the method. SafeAILab's first heads are named as the model is.
ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "eagle": (
        *("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "EagleSpeculator"),
        *("LlamaForCausalLM", "Qwen2ForCausalLM"),
    ),
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"),
}
IN_SPECULATORS = "speculators_model_type"  # only folders of that library have this field
# Layers whose inputs a head reads unless it names others: near the start, the middle and the end.
MIN_TAPPED_LAYERS = 6


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Names of tensors, "" for norms that a head lacks. `{layer}` is the prefix of the layer."""

    layers: tuple[str, ...]  # prefixes of the layer, of which a folder has one
    projection: str
    embedding_norm: str = ""
    state_norm: str = ""
    input_norm: str = ""  # of the layer
    norm: str = ""  # of the output
    ignored: tuple[str, ...] = ()


EAGLE3 = HeadNames(
    layers=("midlayer.", "layers.0."),
    projection="fc",
    embedding_norm="{layer}input_layernorm",
    state_norm="{layer}hidden_norm",
    norm="norm",
    ignored=("t2d", "mask_hidden"),
)
# Copies of the model's embedding and LM head are not read.
EAGLE = HeadNames(("layers.0.",), "fc", ignored=("embed_tokens.weight", "lm_head.weight"))
SPECULATORS = replace(EAGLE, layers=("transformer.",), projection="fusion_fc")
SPECULATORS_WITH_NORMS = replace(
    SPECULATORS,
    embedding_norm="embedding_layernorm",
    input_norm="{layer}input_layernorm",
    norm="pre_lm_head_layernorm",
)


@dataclass(frozen=True, slots=True)
class HeadConfig:
    model: ModelConfig  # of the one layer
    names: HeadNames
    target_size: int  # of the target's hidden states
    num_draft_tokens: int  # that it can draft: a part of the vocabulary
    taps: tuple[int, ...] = ()  # layers of the target whose inputs it reads; none: the last states
    norms_all_taps: bool = False  # one norm of the joined taps
    norms_each_tap: bool = False
    adds_normed: bool = False  # the layer adds its outputs to its normed input
    feeds_back_normed: bool = False  # its next step gets the output after the final norm


def read_head_config(method: str, checkpoint: Checkpoint, target: ModelConfig) -> HeadConfig:
    """Raises ModelError if the folder has no head of this method, or one of another model."""
    raw = checkpoint.read_config()
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else raw.get(IN_SPECULATORS)
    known = ARCHITECTURES[method]
    if name not in known and raw.get(IN_SPECULATORS) != method:
        kind = method.upper().replace("3", "-3")
        raise raw.wrong("architectures", f"must name an {kind} head: one of {', '.join(known)}")
    is_wrapped = raw.has(IN_SPECULATORS)
    fields = raw.inner("transformer_layer_config") if is_wrapped else raw
    model = _read_model(fields)
    if method == "eagle":
        config = HeadConfig(model, _eagle_names(raw), model.hidden_size, model.vocab_size)
    else:
        config = _read_eagle3(raw, model, target, is_wrapped=is_wrapped)
    _check_fit(config, target, fields)
    return config


def _eagle_names(raw: JsonFields) -> HeadNames:
    if not raw.has(IN_SPECULATORS):
        return EAGLE
    return SPECULATORS_WITH_NORMS if raw.flag("layernorms", False) else SPECULATORS


def _read_eagle3(
    raw: JsonFields, model: ModelConfig, target: ModelConfig, *, is_wrapped: bool
) -> HeadConfig:
    eagle = raw.inner("eagle_config") if raw.has("eagle_config") else raw
    if not eagle.flag("use_aux_hidden_state", True):
        raise eagle.wrong("use_aux_hidden_state", "must be true: other heads are not supported")
    return HeadConfig(
        model=model,
        names=EAGLE3,
        taps=_read_taps(raw, eagle, target),
        target_size=raw.positive_int("target_hidden_size", model.hidden_size),
        num_draft_tokens=raw.positive_int("draft_vocab_size", model.vocab_size),
        norms_all_taps=eagle.flag("norm_before_fc", raw.flag("norm_before_fc", False)),
        norms_each_tap=raw.flag("fc_norm", False),
        adds_normed=raw.flag("norm_before_residual", is_wrapped),
        feeds_back_normed=raw.flag("norm_output", False),
    )


def _read_model(fields: JsonFields) -> ModelConfig:
    # Biases are read where the files have them.
    plain = fields.with_fields({"architectures": ["LlamaForCausalLM"], "qkv_bias": False})
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
    size = "target_hidden_size" if config.taps else "hidden_size"
    wanted = {
        "vocab_size": (config.model.vocab_size, target.vocab_size),
        size: (config.target_size, target.hidden_size),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise ModelError(
                f"{fields.where}: {name} is {found}, but that of {target.architecture} is "
                f"{expected}: this head does not fit the model"
            )
    if target.latent is not None:
        raise ModelError(f"{fields.where}: heads for models with latent attention are unsupported")
    if target.altup is not None:
        raise ModelError(f"{fields.where}: heads for models with AltUp are unsupported")
