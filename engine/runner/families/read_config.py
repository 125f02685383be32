"""Reads a model configuration, as its family describes it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import replace

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError
from baton.engine.runner.families.family import CHUNKED, LINEAR, SLIDING, Family
from baton.engine.runner.families.labels import read_label_tokens, read_num_labels
from baton.engine.runner.families.latent import with_latent
from baton.engine.runner.families.layer_types import full_everywhere
from baton.engine.runner.families.math_fields import check_fields
from baton.engine.runner.families.mixtures import check_moe
from baton.engine.runner.families.rope_fields import read_ropes, read_rotary_dim
from baton.engine.runner.families.table import EXPERTS as EXPERT_COUNTS
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.model.config import (
    LayerConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    PerLayerConfig,
    QkNorm,
    RecurrentConfig,
    RopeConfig,
)
from baton.engine.runner.model.quantization import read_quantization

MAX_LAYERS = 10_000
# Endings of the names of architectures.
GENERATES, CLASSIFIES = "ForCausalLM", "ForSequenceClassification"
MAX_EXPERTS = 1 << 17  # in all layers: their tensors are looked for one by one
NO_ROPE = RopeConfig(kind="none")
PER_LAYER_SIZE = "hidden_size_per_layer_input"


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read and check the fields. Raises ModelError for an unsupported architecture or field."""
    raw = checkpoint.read_config()
    name, kind = _read_architecture(raw)
    config = read_config_of(name, raw)
    if kind == GENERATES:
        return config
    # Without a head for tokens, that of the embedding stands in.
    config = replace(config, ties_embeddings=True, can_generate=False)
    if kind != CLASSIFIES:
        return config
    label_tokens = read_label_tokens(raw, checkpoint)
    num_labels = 1 if label_tokens else read_num_labels(raw)
    return replace(config, num_labels=num_labels, label_tokens=label_tokens)


def knows_architecture(raw: JsonFields) -> bool:
    found = _find_architecture(raw)
    return found is not None and not raw.flag(FAMILIES[found[0]].excluding, False)


def read_config_of(architecture: str, raw: JsonFields) -> ModelConfig:
    """Read and check the fields of an architecture that generates. Raises ModelError."""
    family = FAMILIES[architecture]
    fields = _read_text_fields(family, raw)
    text_defaults = family.text_defaults.get(str(fields.get("model_type")), {})
    fields = fields.with_defaults({**family.defaults, **text_defaults})
    if family.rename is not None:
        fields = family.rename(fields)
    check_fields(fields, family)
    return _read(architecture, family, fields, raw)


def _read_text_fields(family: Family, raw: JsonFields) -> JsonFields:
    """Return the fields of the text model. Some of those outside of `text_config` hold for it."""
    if not raw.has("text_config"):
        return raw
    if not family.has_text_config:
        raise raw.wrong("text_config", "must be null for an architecture of text alone")
    names = ("dtype", "torch_dtype", "tie_word_embeddings")
    outer = {name: raw.get(name) for name in names if raw.has(name)}
    return raw.inner("text_config").with_fields(outer)


def _read(name: str, family: Family, fields: JsonFields, raw: JsonFields) -> ModelConfig:
    num_heads, hidden_size = (
        fields.positive_int(field) for field in ("num_attention_heads", "hidden_size")
    )
    head_dim = _read_head_dim(fields, hidden_size, num_heads)
    layers, ropes = _read_layers(family, fields)
    config = ModelConfig(
        architecture=name,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=fields.positive_int("max_position_embeddings"),
        norm=NormConfig(
            fields.number("rms_norm_eps", 1e-6, above=0),
            family.norm_weight_offset,
            family.norm_rounds_once,
            family.has_layer_norms,
        ),
        ropes=ropes,
        rotary_dim=read_rotary_dim(fields, head_dim),
        is_rope_interleaved=_read_flag(family.is_rope_interleaved, fields),
        layers=layers,
        activation=family.activation,
        moe=_read_moe(family, fields, layers),
        attention_scale=_read_attention_scale(family, fields, head_dim),
        ties_embeddings=fields.flag("tie_word_embeddings", False),
        has_qkv_bias=_read_flag(family.has_qkv_bias, fields),
        has_output_bias=_read_flag(family.has_output_bias, fields),
        has_mlp_bias="mlp_bias" in family.fields and fields.flag("mlp_bias", False),
        has_sinks=family.has_sinks,
        attention_softcap=_optional(family, fields, "attn_logit_softcapping"),
        logits_softcap=_optional(family, fields, "final_logit_softcapping"),
        logits_scale=1 / (_optional(family, fields, "logits_scaling") or 1.0),
        embedding_scale=_read_embedding_scale(family, fields, hidden_size),
        residual_scale=_optional(family, fields, "residual_multiplier") or 1.0,
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
        dtype=read_dtype(fields),
        quantization=read_quantization(raw if raw.has("quantization_config") else fields),
        recurrent=_read_recurrent(family, fields, layers),
        has_output_gate=family.has_output_gate,
        has_parallel_mlp=family.has_parallel_mlp,
        norms_values=family.norms_values,
        per_layer=_read_per_layer(family, fields),
        has_layer_scale=family.has_layer_scale,
        altup=None if family.altup is None else family.altup(fields),
    )
    if family.has_latent:
        config = with_latent(config, fields)
    if family.row_scales is not None:
        config = replace(config, row_scales=tuple(family.row_scales(config, fields)))
    _check_heads(config, fields)
    return config


def _read_architecture(raw: JsonFields) -> tuple[str, str]:
    """Return the architecture of the family that generates, and the ending of the one named."""
    found = _find_architecture(raw)
    if found is not None:
        return found
    raise raw.wrong(
        "architectures",
        f"must name one of {', '.join(FAMILIES)}, or one that ends with {CLASSIFIES} or Model "
        f"instead of {GENERATES}",
    )


def _find_architecture(raw: JsonFields) -> tuple[str, str] | None:
    names = raw.get("architectures")
    if isinstance(names, list) and len(names) == 1:
        name = str(names[0])
        if name in FAMILIES:
            return name, GENERATES
        for ending in (CLASSIFIES, "TextModel", "Model"):
            generating = f"{name.removesuffix(ending)}{GENERATES}"
            if name.endswith(ending) and generating in FAMILIES:
                return generating, ending
    return None


def _read_layers(
    family: Family, fields: JsonFields
) -> tuple[tuple[LayerConfig, ...], tuple[RopeConfig, ...]]:
    num_layers = fields.positive_int("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", f"must be at most {MAX_LAYERS}")
    types = (family.layer_types or full_everywhere)(fields, num_layers)
    ropes = _Ropes(family, fields, frozenset(types))
    dense = frozenset(range(num_layers))
    if family.moe is not None:
        dense = family.dense_layers(fields, num_layers) if family.dense_layers else frozenset()
    size = fields.positive_int(family.dense_size) if dense else 0
    layers = []
    for index, kind in enumerate(types):
        query_rope, key_rope = ropes.find(index, kind)
        layers.append(
            LayerConfig(
                window=fields.positive_int("sliding_window") if kind == SLIDING else None,
                chunk=fields.positive_int("attention_chunk_size") if kind == CHUNKED else None,
                query_rope=query_rope,
                key_rope=key_rope,
                qk_norm=_read_qk_norm(family, fields, kind, has_rope=ropes.has_rope(index)),
                mlp_size=size if index in dense else 0,
                is_recurrent=kind == LINEAR,
                sees_whole_pictures=family.sees_whole_pictures,
            )
        )
    if family.unlike_layers is not None:
        layers = list(family.unlike_layers(fields, types, layers))
    return tuple(layers), ropes.all()


def _read_per_layer(family: Family, fields: JsonFields) -> PerLayerConfig | None:
    if PER_LAYER_SIZE not in family.fields or fields.get(PER_LAYER_SIZE) == 0:
        return None
    vocab_size = fields.positive_int("vocab_size")
    own = fields.positive_int("vocab_size_per_layer_input", vocab_size)
    has_every_token = own >= vocab_size
    if not has_every_token and family.altup is None:
        raise fields.wrong("vocab_size_per_layer_input", f"must be at least {vocab_size}")
    placeholder_id = fields.number("pad_token_id", 0)
    if placeholder_id not in range(vocab_size):
        raise fields.wrong("pad_token_id", f"must be a token id below {vocab_size}")
    size = fields.positive_int(PER_LAYER_SIZE)
    return PerLayerConfig(size, own, int(placeholder_id), has_every_token=has_every_token)


class _Ropes:
    """Numbers the different RoPEs of a model."""

    def __init__(self, family: Family, fields: JsonFields, types: frozenset[str]) -> None:
        self._by_type = read_ropes(
            fields, types, has_local_rope=family.has_local_rope, fields=family.fields
        )
        self._temperature = None if family.temperature is None else family.temperature(fields)
        num_layers = fields.positive_int("num_hidden_layers")
        self._lacks_rope: frozenset[int] = frozenset()
        if family.lacks_rope is not None:
            self._lacks_rope = family.lacks_rope(fields, num_layers)
        self._scales_all = "no_rope_layers" not in family.fields
        self._found: list[RopeConfig] = []

    def has_rope(self, layer: int) -> bool:
        return layer not in self._lacks_rope

    def find(self, layer: int, kind: str) -> tuple[int, int]:
        """Return the indices of the RoPEs of queries and keys."""
        rope = self._by_type[kind] if self.has_rope(layer) else NO_ROPE
        query_rope = rope
        if self._temperature is not None and (self._scales_all or not self.has_rope(layer)):
            query_rope = replace(rope, temperature=self._temperature)
        return self._number(query_rope), self._number(rope)

    def all(self) -> tuple[RopeConfig, ...]:
        return tuple(self._found)

    def _number(self, rope: RopeConfig) -> int:
        if rope not in self._found:
            self._found.append(rope)
        return self._found.index(rope)


def _read_qk_norm(family: Family, fields: JsonFields, layer_type: str, *, has_rope: bool) -> QkNorm:
    kind = QkNorm.NONE if layer_type == LINEAR else family.qk_norm
    if isinstance(kind, str):
        kind = QkNorm.HEAD if fields.flag(kind, False) else QkNorm.NONE
    if kind is QkNorm.UNWEIGHTED and not (has_rope and fields.flag("use_qk_norm", True)):
        return QkNorm.NONE
    return kind


def _read_moe(
    family: Family, fields: JsonFields, layers: tuple[LayerConfig, ...]
) -> MoeConfig | None:
    if family.moe is None or not any(layer.has_experts for layer in layers):
        return None
    moe = family.moe(fields)
    check_moe(moe, fields)
    max_experts = MAX_EXPERTS // len(layers)
    if moe.num_experts > max_experts:
        name = next(filter(fields.has, sorted(EXPERT_COUNTS)))
        raise fields.wrong(name, f"must be at most {max_experts} in each of {len(layers)} layers")
    return moe


def _read_recurrent(
    family: Family, fields: JsonFields, layers: tuple[LayerConfig, ...]
) -> RecurrentConfig | None:
    if family.recurrent is None or not any(layer.has_state for layer in layers):
        return None
    return family.recurrent(fields)


def _read_attention_scale(family: Family, fields: JsonFields, head_dim: int) -> float:
    if family.attention_scale is not None:
        return family.attention_scale
    scale = _optional(family, fields, "attention_multiplier")
    if scale is not None:
        return scale
    scalar = _optional(family, fields, "query_pre_attn_scalar")
    return 1 / math.sqrt(head_dim if scalar is None else scalar)


def _read_embedding_scale(family: Family, fields: JsonFields, hidden_size: int) -> float:
    if family.scales_embedding:
        return math.sqrt(hidden_size)
    return _optional(family, fields, "embedding_multiplier") or 1.0


def _optional(family: Family, fields: JsonFields, name: str) -> float | None:
    return fields.optional_number(name, above=0) if name in family.fields else None


def _read_flag(flag: bool | str, fields: JsonFields) -> bool:
    return fields.flag(flag, False) if isinstance(flag, str) else flag


def _read_head_dim(fields: JsonFields, hidden_size: int, num_heads: int) -> int:
    head_dim = hidden_size // num_heads
    if fields.has("head_dim"):
        head_dim = fields.positive_int("head_dim")
    elif head_dim == 0:
        raise fields.wrong("num_attention_heads", f"must be at most hidden_size ({hidden_size})")
    if head_dim % 2:
        raise fields.wrong("head_dim", f"must be even, unlike {head_dim}")
    return head_dim


def _check_heads(config: ModelConfig, fields: JsonFields) -> None:
    counts = {config.of_layer(index).num_kv_heads for index in range(config.num_layers)}
    if any(config.num_heads % count for count in counts):
        expected = f"must divide num_attention_heads ({config.num_heads})"
        raise fields.wrong("num_key_value_heads", expected)
    for rope in config.ropes:
        for name in ("short_factor", "long_factor"):
            factors = rope.short_factors if name == "short_factor" else rope.long_factors
            if rope.kind == "longrope" and len(factors) != config.rotary_dim // 2:
                raise ModelError(
                    f"{fields.where}: {name!r} has {len(factors)} numbers; "
                    f"it must have {config.rotary_dim // 2}"
                )


def read_dtype(fields: JsonFields) -> str:
    # transformers 5 writes `dtype`, earlier ones `torch_dtype`.
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(name):
        return "float32"
    if fields.get(name) not in ("float32", "bfloat16", "float16"):
        raise fields.wrong(name, "must be float32, bfloat16 or float16")
    return str(fields.get(name))
