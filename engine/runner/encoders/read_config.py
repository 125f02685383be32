"""Reads the architecture of an encoder from config.json."""

from __future__ import annotations

from typing import NamedTuple

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.checkpoint.pooling_files import COLBERT
from baton.core.pooling import PoolingKind
from baton.engine.runner.encoders.config import (
    ClassifierConfig,
    EncoderConfig,
    EncoderLayerConfig,
    Gelu,
)
from baton.engine.runner.encoders.table import ENCODERS, EncoderFamily
from baton.engine.runner.families.family import FULL, SLIDING
from baton.engine.runner.families.labels import read_num_labels
from baton.engine.runner.families.read_config import MAX_LAYERS, read_dtype
from baton.engine.runner.model.config import RopeConfig

CLASSIFIES = "ForSequenceClassification"
ENDINGS = (CLASSIFIES, "ForMaskedLM", "Model")
GELUS = {
    "gelu": Gelu.EXACT,
    "gelu_new": Gelu.TANH,
    "gelu_pytorch_tanh": Gelu.TANH,
}
POOLINGS = {"cls": PoolingKind.CLS, "mean": PoolingKind.MEAN}
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
UNSUPPORTED = "changes the computation, and is not supported here"
# Values of fields with which they change nothing.
NEUTRAL = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
    "quantization_config": (),
    "embedding_size": (),
}


class _Architecture(NamedTuple):
    name: str
    family: EncoderFamily
    classifies: bool


def is_encoder(checkpoint: Checkpoint) -> bool:
    """Return whether the architecture is an encoder. Raises ModelError without a config.json."""
    return _find_architecture(checkpoint.read_config()) is not None


def read_encoder_config(checkpoint: Checkpoint) -> EncoderConfig:
    """Read and check the fields. Raises ModelError for an unsupported architecture or field."""
    raw = checkpoint.read_config()
    found = _find_architecture(raw)
    if found is None:
        raise raw.wrong("architectures", f"must begin with one of {', '.join(ENCODERS)}")
    family, fields = found.family, raw.with_defaults(found.family.defaults)
    for name, neutral in NEUTRAL.items():
        if fields.has(name) and fields.get(name) not in neutral:
            raise fields.wrong(name, UNSUPPORTED)
    hidden_size = fields.positive_int("hidden_size")
    num_positions, first = fields.positive_int("max_position_embeddings"), 0
    if family.starts_after_padding:
        first = int(fields.number("pad_token_id")) + 1
        if not 0 <= first < num_positions:
            raise fields.wrong("pad_token_id", f"must be from 0 to {num_positions - 2}")
    layers, ropes = _read_layers(family, fields)
    return EncoderConfig(
        architecture=found.name,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_heads=_read_num_heads(fields, hidden_size),
        mlp_size=fields.positive_int("intermediate_size"),
        max_text_len=_read_max_text_len(checkpoint, num_positions - first),
        num_positions=num_positions if family.names.positions else 0,
        first_position=first,
        num_token_types=fields.positive_int("type_vocab_size") if family.names.token_types else 0,
        norm_epsilon=fields.number(family.epsilon, above=0),
        layers=layers,
        ropes=ropes,
        is_pre_norm=family.is_pre_norm,
        gelu=_read_gelu(fields, family.activation),
        is_gated=family.is_gated,
        has_attention_bias=_read_flag(family.has_attention_bias, fields),
        has_mlp_bias=_read_flag(family.has_mlp_bias, fields),
        has_norm_bias=_read_flag(family.has_norm_bias, fields),
        classifier=_read_classifier(family, fields) if found.classifies else None,
        dtype=read_dtype(fields),
    )


def architecture_family(architecture: str) -> EncoderFamily:
    """Return the family of the architecture of a configuration."""
    ending = next(each for each in ENDINGS if architecture.endswith(each))
    return ENCODERS[architecture.removesuffix(ending)]


def _find_architecture(raw: JsonFields) -> _Architecture | None:
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if name == COLBERT and raw.get("model_type") == "bert":
        name = "BertModel"
    for ending in ENDINGS:
        family = ENCODERS.get(name.removesuffix(ending))
        if name.endswith(ending) and family is not None:
            return _Architecture(name, family, ending == CLASSIFIES)
    return None


def _read_num_heads(fields: JsonFields, hidden_size: int) -> int:
    num_heads = fields.positive_int("num_attention_heads")
    if hidden_size % (2 * num_heads):
        expected = f"must divide hidden_size ({hidden_size}) into heads of an even size"
        raise fields.wrong("num_attention_heads", expected)
    return num_heads


def _read_max_text_len(checkpoint: Checkpoint, num_positions: int) -> int:
    """Return the smaller one of the model's limit and that of its embedder."""
    return min(num_positions, checkpoint.read_max_text_len() or num_positions)


def _read_layers(
    family: EncoderFamily, fields: JsonFields
) -> tuple[tuple[EncoderLayerConfig, ...], tuple[RopeConfig, ...]]:
    num_layers = fields.positive_int("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", f"must be at most {MAX_LAYERS}")
    if not family.has_local_layers:
        return (EncoderLayerConfig(),) * num_layers, ()
    local = EncoderLayerConfig(fields.positive_int("local_attention", 128) // 2, rope=1)
    by_type = {FULL: EncoderLayerConfig(rope=0), SLIDING: local}
    types = _read_layer_types(fields, num_layers)
    return tuple(by_type[kind] for kind in types), tuple(_read_rope(fields, k) for k in by_type)


def _read_layer_types(fields: JsonFields, num_layers: int) -> list[str]:
    if not fields.has("layer_types"):
        period = fields.positive_int("global_attn_every_n_layers", 3)
        return [SLIDING if index % period else FULL for index in range(num_layers)]
    types = fields.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers or set(types) - {FULL, SLIDING}:
        raise fields.wrong("layer_types", f"must list {num_layers} of {FULL} and {SLIDING}")
    return types


def _read_rope(fields: JsonFields, kind: str) -> RopeConfig:
    """Return the RoPE of a kind of layers. Only plain ones are known in encoders."""
    if fields.has("rope_scaling"):
        raise fields.wrong("rope_scaling", UNSUPPORTED)
    name, default = THETAS[kind]
    theta = fields.number(name, default, above=1)
    if fields.has("rope_parameters"):
        inner = fields.inner("rope_parameters")
        if inner.has(kind):
            inner = inner.inner(kind)
            if inner.has("rope_type") and inner.get("rope_type") != "default":
                raise inner.wrong("rope_type", "must be 'default'")
            theta = inner.number("rope_theta", theta, above=1)
    return RopeConfig(theta=theta)


def _read_gelu(fields: JsonFields, name: str) -> Gelu:
    found = fields.get(name) or "gelu"
    if found not in GELUS:
        raise fields.wrong(name, f"must be one of {', '.join(GELUS)}")
    return GELUS[str(found)]


def _read_classifier(family: EncoderFamily, fields: JsonFields) -> ClassifierConfig:
    pooling = PoolingKind.CLS
    if fields.has("classifier_pooling"):
        if fields.get("classifier_pooling") not in POOLINGS:
            raise fields.wrong("classifier_pooling", f"must be one of {', '.join(POOLINGS)}")
        pooling = POOLINGS[str(fields.get("classifier_pooling"))]
    if (fields.get("classifier_activation") or "gelu") != "gelu":
        raise fields.wrong("classifier_activation", "must be 'gelu'")
    return ClassifierConfig(
        num_labels=read_num_labels(fields),
        pooling=pooling,
        has_tanh=family.has_tanh,
        has_norm=bool(family.names.dense_norm),
        has_dense_bias=_read_flag(family.has_dense_bias, fields),
        gives_logits=_gives_logits(fields),
    )


def _gives_logits(fields: JsonFields) -> bool:
    """Return whether a cross-encoder of sentence-transformers is used without a function."""
    name = "sbert_ce_default_activation_function"  # of older versions
    if fields.has("sentence_transformers"):
        fields, name = fields.inner("sentence_transformers"), "activation_fn"
    found = str(fields.get(name) or "Sigmoid").rpartition(".")[2]
    if found not in ("Identity", "Sigmoid"):
        raise fields.wrong(name, "must be Identity or Sigmoid")
    return found == "Identity"


def _read_flag(flag: bool | str, fields: JsonFields) -> bool:
    return fields.flag(flag, False) if isinstance(flag, str) else flag
