"""Model configuration: the architecture of a decoder as values. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, NamedTuple

from baton.engine.kv_cache.groups import (
    KvCacheSpec,
    KvGroup,
    KvHeads,
    LayerPlace,
    group_layers,
    layer_places,
)
from baton.engine.runner.model.quantization import Quantization


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Scale of a query that grows with its position.

    The scale is 1 + gain * log(1 + floor((position + offset) / period)).
    """

    period: float
    gain: float
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """RoPE parameters. Fields other than `theta` apply only to some kinds.

    The kind `none` rotates nothing. A temperature multiplies cosines and sines, and so the rotated
    queries.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    temperature: QueryTemperature | None = None
    rotated_share: float = 1.0  # of the pairs of dimensions (proportional): the first ones rotate
    # Pairs of dimensions that rotate by time, row and column of a token; empty: by its position.
    sections: tuple[int, ...] = ()
    are_sections_interleaved: bool = False

    @property
    def depends_on_length(self) -> bool:
        """Return whether the angles of a position depend on the length of its sequence."""
        return self.kind in ("dynamic", "longrope")

    def mscale_of(self, mscale: float) -> float:
        """Return YaRN's scale of cosines and sines for one value of `mscale`."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


class Activation(Enum):
    """Function of the MLP's gate, or of its up projection if it has no gate."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), clamped
    SQUARED_RELU = "relu2"  # without a gate: `Mlp.gate_up` has the rows of up alone

    @property
    def is_gated(self) -> bool:
        """Return whether an MLP has a gate beside its up projection."""
        return self is not Activation.SQUARED_RELU


class QkNorm(Enum):
    """Normalisation of queries and keys, before RoPE if nothing else is said."""

    NONE = "none"
    HEAD = "head"  # RMS norm of each head with its weights
    ALL_HEADS = "all heads"  # RMS norm over all heads of a token
    UNWEIGHTED = "unweighted"  # RMS norm of each head without weights, on layers with RoPE
    ROTATED = "rotated"  # RMS norm of each head with its weights, after RoPE


@dataclass(frozen=True, slots=True)
class NormConfig:
    epsilon: float
    weight_offset: float = 0.0  # added to the stored weights
    rounds_once: bool = False  # round the product with the weight, not the factors
    is_centered: bool = False  # layer norms without biases in place of RMS norms


class Scoring(Enum):
    """Conversion of router logits to expert weights."""

    SOFTMAX = "softmax"  # over all experts, then the best are chosen
    SOFTMAX_OF_TOP = "softmax of top"  # over the chosen experts
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts of a layer."""

    num_experts: int
    top_k: int
    expert_size: int
    scoring: Scoring = Scoring.SOFTMAX
    normalizes: bool = False  # the chosen weights sum to one
    scale: float = 1.0  # multiplies the chosen weights
    num_groups: int = 1  # only experts of the best `top_groups` groups are chosen
    top_groups: int = 1
    group_best: int = 2  # a group counts by the sum of so many of its best scores
    has_correction_bias: bool = False  # added to the scores for the choice alone
    has_bias: bool = False  # router and experts
    scales_input: bool = False  # the weights scale an expert's input instead of its output
    shared_size: int = 0  # size of the MLP that computes all tokens, 0 for none
    has_shared_gate: bool = False
    latent_size: int | None = None  # of the experts' inputs and outputs; None: the hidden size
    own_experts: range = range(0)  # if other ranks compute the others; empty: all

    @property
    def loaded_experts(self) -> range:
        return self.own_experts or range(self.num_experts)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (MLA).

    The cache holds one key per token for all heads: the latent and a rotated part. The latent is
    the value, too. Queries are projected into the latent space, and its values out of it.
    """

    query_rank: int | None  # None: queries are projected in one step
    rank: int  # size of the latent
    nope_dim: int  # unrotated part of a query head
    rope_dim: int  # rotated part of a query head and of the key
    value_dim: int  # a head's output


class Recurrence(Enum):
    """Rule by which a token changes the state of a recurrent layer."""

    GATED_DELTA = "gated delta rule"
    KIMI_DELTA = "Kimi delta attention"
    MAMBA2 = "Mamba2"
    SHORT_CONV = "short convolution"


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """Layers with a state instead of keys and values, after a short convolution over the tokens.

    The state of a layer is a matrix of key_dim rows for each value head, in float32, and the last
    inputs of the convolution. The queries, keys and values of Mamba2 are its C, B and x: key heads
    are its groups, and key_dim is its state size. A short convolution alone has no matrix: key_dim
    is 0.
    """

    num_key_heads: int
    num_value_heads: int  # each key head belongs to as many neighbouring ones
    key_dim: int  # per head
    value_dim: int  # per head
    conv_size: int  # tokens that the convolution sees, the token itself included
    rule: Recurrence = Recurrence.GATED_DELTA
    has_norm: bool = True  # for the output; False: Mamba2 has its gates alone
    norm_epsilon: float | None = None  # None: that of the model's norms
    strength_scale: float = 1.0  # of the write strengths of the delta rule

    @property
    def num_decays(self) -> int:
        """Return the decays of a value head: one for each key channel, or one for all."""
        return self.key_dim if self.rule is Recurrence.KIMI_DELTA else 1

    @property
    def num_keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def num_values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Return the numbers per token that the convolution mixes: queries, keys and values."""
        return 2 * self.num_keys + self.num_values


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Properties in which the layers of one model can differ."""

    window: int | None = None  # attention window; includes the token itself
    chunk: int | None = None  # tokens attend only within their own chunk of this size
    query_rope: int = 0  # index into `ModelConfig.ropes`
    key_rope: int = 0
    qk_norm: QkNorm = QkNorm.NONE
    mlp_size: int = 0  # dense MLP; 0 for a mixture of experts, or for neither
    is_recurrent: bool = False  # a state instead of keys and values
    has_parallel_state: bool = False  # a state beside keys and values: both mix the same inputs
    # Heads of keys and values, in a model whose layers have unlike ones; None: those of the model.
    kv_heads: KvHeads | None = None
    # Gates below so many standard deviations above their mean are zero; this is taken from others.
    gate_deviations: float | None = None
    kv_layer: int | None = None  # whose keys and values it reads; None: its own, which it writes
    has_value_projection: bool = True  # False: values are the keys before norm and RoPE
    has_parallel_experts: bool = False  # beside the dense MLP
    sees_whole_pictures: bool = False  # a picture's tokens attend to all tokens of the picture
    has_mlp: bool = True  # dense or of experts; False: the mixer is all of the layer
    # In a folder that numbers mixers and MLPs as blocks: that of the mixer. The MLP's is the next.
    block: int | None = None

    @property
    def has_experts(self) -> bool:
        return self.has_parallel_experts or (self.has_mlp and not self.mlp_size)

    @property
    def has_state(self) -> bool:
        return self.is_recurrent or self.has_parallel_state

    def kv_spec(self, max_context_len: int) -> KvCacheSpec:
        """Return which keys and values the layer needs, in sequences of at most this length."""
        has_window = self.window is not None and self.window < max_context_len
        has_chunk = self.chunk is not None and self.chunk < max_context_len
        window, chunk = self.window if has_window else None, self.chunk if has_chunk else None
        return KvCacheSpec(window, chunk, self.kv_heads)


class RowScale(NamedTuple):
    """Number that multiplies rows of a matrix of each layer when it is loaded."""

    matrix: str  # its name in the layer
    num_rows: int  # those after the rows of the scale before it
    scale: float


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """Inputs that each layer has of its own for each token (Gemma 3n and 4)."""

    size: int  # of the input of one layer
    vocab_size: int
    placeholder_id: int  # whose inputs the tokens of pictures have
    has_every_token: bool = True  # False: tokens after the last row have the inputs of token 0


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """Alternating updates: layers predict several streams of hidden states, and compute one."""

    num_streams: int
    active: int  # the stream that layers compute
    has_output_scale: bool
    laurel_rank: int  # of the learned residual beside attention (LAuReL)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a decoder, independent of its model family."""

    kernel_dtypes: ClassVar[Sequence[str]] = ("bfloat16",)

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # in the cache
    head_dim: int  # size of a key in the cache
    max_position_embeddings: int
    norm: NormConfig
    ropes: tuple[RopeConfig, ...]
    rotary_dim: int  # dimensions of a head that RoPE rotates: the first ones
    is_rope_interleaved: bool  # RoPE pairs neighbouring dimensions
    layers: tuple[LayerConfig, ...]
    activation: Activation
    moe: MoeConfig | None
    attention_scale: float
    ties_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_sinks: bool  # a learned logit per head that takes part in the softmax of attention
    attention_softcap: float | None
    logits_softcap: float | None
    logits_scale: float
    embedding_scale: float
    residual_scale: float  # multiplies the outputs of attention and MLP
    swiglu_alpha: float
    swiglu_limit: float
    dtype: str  # as saved: float32, bfloat16 or float16
    quantization: Quantization | None  # as saved
    latent: LatentConfig | None = None
    recurrent: RecurrentConfig | None = None  # the same for all recurrent layers
    has_output_gate: bool = False  # attention's output times the sigmoid of a gate
    has_parallel_mlp: bool = False  # attention and MLP take the same input
    can_generate: bool = True  # it has a head for tokens
    num_labels: int = 0  # of a classifier of texts
    label_tokens: tuple[int, int] | None = None  # whose rows of the head give the only label
    norms_values: bool = False  # RMS norm of the values of each head, without weights
    per_layer: PerLayerConfig | None = None
    has_layer_scale: bool = False  # the output of a layer is multiplied by a number of its own
    altup: AltUpConfig | None = None
    suppressed_token_ids: tuple[int, ...] = ()  # never sampled
    row_scales: tuple[RowScale, ...] = ()
    # In a KV cache that layers of another model share: the places of those with attention, and how
    # many layers with attention are before them. Without places, the cache is the model's own.
    cache_places: tuple[LayerPlace, ...] = ()
    num_before: int = 0

    @property
    def sees_whole_pictures(self) -> bool:
        """Return whether the tokens of a picture must be computed in one pass."""
        return any(layer.sees_whole_pictures for layer in self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if not layer.is_recurrent)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.has_state)

    def of_layer(self, index: int) -> ModelConfig:
        """Return the model as if all layers had the heads of this one."""
        heads = self.layers[index].kv_heads
        if heads is None:
            return self
        rotary_dim = heads.dim * self.rotary_dim // self.head_dim
        return replace(self, num_kv_heads=heads.num, head_dim=heads.dim, rotary_dim=rotary_dim)

    @property
    def num_kv_tensors(self) -> int:
        """Return 2 if the cache holds keys and values, 1 if a key contains its value."""
        return 2 if self.latent is None else 1

    @property
    def rope_head_dim(self) -> int:
        """Return the dimensions of a head that take part in RoPE, rotated or not."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_grid_positions(self) -> bool:
        """Return whether the tokens of a picture have rows and columns as positions."""
        return any(rope.sections for rope in self.ropes)

    @property
    def depends_on_length(self) -> bool:
        """Return whether the KV of a position depends on the length of its prompt."""
        return any(rope.depends_on_length for rope in self.ropes)

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """Return the layers with their own keys and values, grouped by which they need."""
        max_len = self.max_context_len()
        writers = [i for i in self.attention_layers if self.layers[i].kv_layer is None]
        return group_layers({i: self.layers[i].kv_spec(max_len) for i in writers})

    def kv_places(self) -> tuple[LayerPlace, ...]:
        """Return where each layer with attention finds its keys and values."""
        if self.cache_places:
            return self.cache_places
        writers = [i for i in self.attention_layers if self.layers[i].kv_layer is None]
        own = dict(zip(writers, layer_places(self.kv_groups()), strict=True))
        read = [(i, self.layers[i].kv_layer) for i in self.attention_layers]
        return tuple(own[layer if source is None else source] for layer, source in read)

    def attention_number(self, layer: int) -> int:
        """Return the number of a layer among all of the KV cache that have attention."""
        return self.num_before + self.attention_layers.index(layer)

    @property
    def last_writer(self) -> int:
        """Return the last layer that writes what later tokens need."""
        return max(i for i, layer in enumerate(self.layers) if layer.kv_layer is None)

    def max_shareable_prompt_len(self) -> int | None:
        """Return the prompt length up to which KV does not depend on it, None without a limit."""
        kinds = {rope.kind for rope in self.ropes}
        if "longrope" in kinds:
            return max(rope.original_max_position_embeddings for rope in self.ropes)
        return self.max_position_embeddings if "dynamic" in kinds else None

    def max_context_len(self) -> int:
        """Return the maximum context length, with RoPE scaling applied."""
        # With several RoPEs, as in Gemma 3, `max_position_embeddings` includes their scaling.
        trained = self.max_position_embeddings
        rotating = [rope for rope in self.ropes if rope.kind != "none"]
        return min((_stretched_len(rope, trained) for rope in rotating), default=trained)


def _stretched_len(rope: RopeConfig, trained_len: int) -> int:
    if rope.kind in ("linear", "dynamic"):
        return int(trained_len * rope.factor)
    if rope.kind == "yarn":
        return max(int(rope.original_max_position_embeddings * rope.factor), trained_len)
    return trained_len
