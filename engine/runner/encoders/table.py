"""Table of encoder families. A family is data: names of tensors and fields, and fixed properties.

Architectures of a family end with `Model`, `ForMaskedLM` (its head is not loaded) or
`ForSequenceClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL = "{model}"  # in a name: the prefix under which the encoder is stored


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of the stored tensors. Names of a layer are relative to it; `""` means none."""

    prefixes: tuple[str, ...] = ("bert.", "")
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layers: str = "encoder.layer"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str = ""
    # Of the classifier.
    dense: str = f"{MODEL}pooler.dense"
    dense_norm: str = ""
    labels: str = "classifier"
    # Beginnings of names, after the prefix, of tensors that are not needed.
    ignored: tuple[str, ...] = ("pooler.", "cls.", "embeddings.position_ids", "linear.")


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A model family. Flags can be fixed, or be the name of a config field."""

    names: EncoderNames = EncoderNames()
    defaults: Mapping[str, object] = field(default_factory=dict)  # for missing config fields
    epsilon: str = "layer_norm_eps"
    activation: str = "hidden_act"
    starts_after_padding: bool = False  # the first position is pad_token_id + 1
    has_local_layers: bool = False  # windows and RoPE instead of learned positions
    is_pre_norm: bool = False
    is_gated: bool = False
    has_attention_bias: bool | str = True
    has_mlp_bias: bool | str = True
    has_norm_bias: bool | str = True
    # Of the classifier.
    has_tanh: bool = True
    has_dense_bias: bool | str = True


_BERT = EncoderFamily(defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2})
_ROBERTA_NAMES = EncoderNames(
    prefixes=("roberta.", ""),
    dense="classifier.dense",
    labels="classifier.out_proj",
    ignored=("pooler.", "lm_head.", "embeddings.position_ids"),
)
_ROBERTA = EncoderFamily(
    names=_ROBERTA_NAMES,
    defaults={"layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 1},
    starts_after_padding=True,
)
_MODERN_BERT = EncoderFamily(
    names=EncoderNames(
        prefixes=("model.", ""),
        words="embeddings.tok_embeddings",
        positions="",
        token_types="",
        embedding_norm="embeddings.norm",
        layers="layers",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        attention_norm="attn_norm",
        up="mlp.Wi",
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        final_norm="final_norm",
        dense="head.dense",
        dense_norm="head.norm",
        ignored=("head.", "decoder."),
    ),
    defaults={"norm_eps": 1e-5, "max_position_embeddings": 8192},
    epsilon="norm_eps",
    activation="hidden_activation",
    has_local_layers=True,
    is_pre_norm=True,
    is_gated=True,
    has_attention_bias="attention_bias",
    has_mlp_bias="mlp_bias",
    has_norm_bias="norm_bias",
    has_tanh=False,
    has_dense_bias="classifier_bias",
)

ENCODERS: Mapping[str, EncoderFamily] = {
    "Bert": _BERT,
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "ModernBert": _MODERN_BERT,
}
