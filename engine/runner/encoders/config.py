"""Encoder configuration: the architecture of an encoder as values. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from baton.core.pooling import PoolingKind
from baton.engine.runner.model.config import RopeConfig


class Gelu(Enum):
    """Function of the MLP."""

    EXACT = "gelu"
    TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class EncoderLayerConfig:
    """Properties in which the layers of one encoder can differ."""

    window: int | None = None  # a token attends to so many tokens before it, and after it
    rope: int | None = None  # index into `EncoderConfig.ropes`; None: no RoPE


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """Head that scores a text: a dense layer with a function, perhaps a norm, and the labels."""

    num_labels: int
    pooling: PoolingKind = PoolingKind.CLS
    has_tanh: bool = True  # else exact GELU
    has_norm: bool = False
    has_dense_bias: bool = True
    gives_logits: bool = False  # scores are logits instead of probabilities


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Architecture of an encoder, independent of its model family."""

    kernel_dtypes: ClassVar[Sequence[str]] = ("bfloat16", "float32")

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    mlp_size: int
    max_text_len: int
    num_positions: int  # with a learned embedding; 0: RoPE
    first_position: int  # of the first token of a text
    num_token_types: int  # with a learned embedding; 0: none
    norm_epsilon: float
    layers: tuple[EncoderLayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    is_pre_norm: bool  # norms of the inputs of attention and MLP, else of the sums after them
    gelu: Gelu
    is_gated: bool  # the MLP multiplies its function with another projection
    has_attention_bias: bool
    has_mlp_bias: bool
    has_norm_bias: bool
    classifier: ClassifierConfig | None
    dtype: str  # as saved: float32, bfloat16 or float16

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def can_generate(self) -> bool:
        return False

    @property
    def num_labels(self) -> int:
        return 0 if self.classifier is None else self.classifier.num_labels

    @property
    def quantization(self) -> None:
        """Return how matrices are stored quantized: no such folder of an encoder is read."""
        return None

    def has_attention_norm(self, layer: int) -> bool:
        """Return whether a layer has one. The first layer's input is normalised by embeddings."""
        return layer > 0 or not self.is_pre_norm
