"""Description of a model family: config fields, fixed properties and tensor names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.model.config import (
    Activation,
    AltUpConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    QkNorm,
    QueryTemperature,
    RecurrentConfig,
    RowScale,
)

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"
# Prefix of the names of tensors that are in the block after that of the layer's mixer.
NEXT_BLOCK = "next block: "

# For a config with this many layers: their types; the layers that have a property.
LayerTypes = Callable[[JsonFields, int], tuple[str, ...]]
LayerRule = Callable[[JsonFields, int], frozenset[int]]
UnlikeLayers = Callable[[JsonFields, Sequence[str], Sequence[LayerConfig]], tuple[LayerConfig, ...]]


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of a mixture of experts, relative to their layer.

    With `{expert}` in a name, each expert has its own tensors. Otherwise one tensor stacks the
    matrices of all experts along its first dimension.
    """

    router: str
    gate_up: tuple[str, ...]  # one name if gate and up are fused
    down: str
    correction_bias: str = ""
    latent: tuple[str, str] = ("", "")  # into the experts' smaller space, and out of it
    shared: str = ""  # prefix of the MLP that computes all tokens
    shared_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str = ""
    is_gated: bool = True  # False: gate_up has the rows of up alone
    is_transposed: bool = False  # stored as [columns, rows]
    is_interleaved: bool = False  # rows of gate and up alternate
    has_weight_suffix: bool = True  # names end with `.weight`
    has_correction_row: bool = False  # the correction bias is a matrix of one row
    # Other forms in which folders store the experts, such as one by one or transposed.
    others: tuple[ExpertNames, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of the tensors of latent attention, relative to their layer."""

    query: str = "self_attn.q_proj"  # or low-rank queries, their norm and their projection
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    key_down: str = "self_attn.kv_a_proj_with_mqa"  # rows of the latent, then of the rotated key
    key_norm: str = "self_attn.kv_a_layernorm"
    key_up: str = "self_attn.kv_b_proj"  # for each head rows of its keys, then of its values


class NormNames(NamedTuple):
    """Names of the norms of a layer, by their fields in `TensorNames`."""

    input_norm: str
    attention_norm: str
    mlp_norm: str
    mlp_output_norm: str


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """Names of a recurrent layer's projections, relative to it. The rule names other tensors."""

    module: str = "mamba"
    # A single matrix has its rows in the order of the rule's `stored_rows`.
    projections: tuple[str, ...] = ("mamba.in_proj",)
    gates: tuple[str, ...] = ()  # none: their rows are in the projection
    # Pairs of matrices that are multiplied in turn: of output gates, and of decays after `gates`.
    low_rank: tuple[tuple[str, str], ...] = ()
    last_projection: str = "out_proj"  # in the module
    # Tensors that the module has by other names than the rule, or in several parts.
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norms: NormNames | None = None  # of the layer; None: those of layers with attention

    @property
    def output(self) -> str:
        return f"{self.module}.{self.last_projection}"

    def stored(self, name: str) -> list[str]:
        """Return the names of the parts of a tensor of the rule, relative to the layer."""
        return [f"{self.module}.{part}" for part in self.others.get(name, (name,))]


@dataclass(frozen=True, slots=True)
class PerLayerNames:
    """Names of the tensors of inputs per layer, relative to the model, and to a layer."""

    embedding: str = "embed_tokens_per_layer"
    projection: str = "per_layer_model_projection"
    norm: str = "per_layer_projection_norm"
    layer_gate: str = "per_layer_input_gate"
    layer_projection: str = "per_layer_projection"
    layer_norm: str = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class AltUpNames:
    """Names of the tensors of AltUp and LAuReL, relative to the model, and to a layer."""

    projections: str = "altup_projections"  # each stream but the first one has its own
    unembed_projections: str = "altup_unembed_projections"
    router: str = "altup.modality_router"
    router_norm: str = "altup.router_norm"
    prediction: str = "altup.prediction_coefs"
    correction: str = "altup.correction_coefs"
    output_scale: str = "altup.correct_output_scale"
    laurel: tuple[str, str] = ("laurel.linear_left", "laurel.linear_right")
    laurel_norm: str = "laurel.post_laurel_norm"


@dataclass(frozen=True, slots=True)
class ParallelNames:
    """Names of the tensors of experts beside a dense MLP, relative to their layer."""

    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    dense_output_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_output_norm: str = "post_feedforward_layernorm_2"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of the stored tensors. Names of a layer are relative to it; `""` means none.

    Those that begin with `NEXT_BLOCK` are relative to the block after it.
    """

    models: tuple[str, ...] = ("model",)  # possible prefixes of embeddings, layers and final norm
    heads: tuple[str, ...] = ("lm_head",)  # name of the LM head with each of these prefixes
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    input_norm: str = "input_layernorm"
    attention_norm: str = ""  # for the output of attention
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = ""
    experts: ExpertNames | None = None
    latent: LatentNames = LatentNames()
    recurrent: RecurrentNames = RecurrentNames()
    ignored: tuple[str, ...] = ()  # prefixes of tensors that text does not need
    embedding: str = "embed_tokens"  # relative to the model
    norm: str = "norm"  # of the last layer's output, relative to the model
    per_layer: PerLayerNames = PerLayerNames()
    altup: AltUpNames = AltUpNames()
    parallel: ParallelNames = ParallelNames()
    layer_scale: str = "layer_scalar"
    spellings: Mapping[str, str] = field(default_factory=dict)  # other ones of names in layers

    def of_layer(self, layer: LayerConfig) -> TensorNames:
        """Return the names with the norms of this layer."""
        norms = self.recurrent.norms if layer.is_recurrent else None
        return self if norms is None else replace(self, **norms._asdict())


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. Flags can be fixed, or be the name of a config field."""

    names: TensorNames = TensorNames()
    fields: frozenset[str] = frozenset()  # optional fields that it honours, of `MATH_FIELDS`
    excluding: str = ""  # a flag of models that compute otherwise: transformers' modules run them
    defaults: Mapping[str, object] = field(default_factory=dict)  # for missing config fields
    # Those of text models of other types, by the `model_type` of `text_config`.
    text_defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    layer_types: LayerTypes | None = None  # None: attention to the whole context
    qk_norm: QkNorm | str = QkNorm.NONE  # a field that switches QkNorm.HEAD on
    norm_weight_offset: float = 0.0
    norm_rounds_once: bool = False
    has_layer_norms: bool = False  # in place of RMS norms
    has_parallel_mlp: bool = False  # attention and MLP take the same input
    activation: Activation = Activation.SILU
    is_rope_interleaved: bool | str = False
    has_local_rope: bool = False  # layers with a window have their own RoPE, without scaling
    has_qkv_bias: bool | str = "attention_bias"
    has_output_bias: bool | str = "attention_bias"
    has_sinks: bool = False
    has_latent: bool = False  # attention in a latent space (MLA)
    has_output_gate: bool = False  # rows of queries, then of their gates, head by head
    recurrent: Callable[[JsonFields], RecurrentConfig] | None = None  # for recurrent layers
    scales_embedding: bool = False  # by the square root of the hidden size
    has_text_config: bool = False  # the text model's fields are in `text_config`
    sees_whole_pictures: bool = False  # a picture's tokens attend to all tokens of the picture
    moe: Callable[[JsonFields], MoeConfig] | None = None
    dense_layers: LayerRule | None = None  # without experts
    dense_size: str = "intermediate_size"
    temperature: Callable[[JsonFields], QueryTemperature | None] | None = None
    lacks_rope: LayerRule | None = None  # layers without RoPE
    # Adds what the layers of a configuration have of their own, by their types.
    unlike_layers: UnlikeLayers | None = None
    attention_scale: float | None = None  # whatever the configuration has
    norms_values: bool = False
    has_layer_scale: bool = False
    altup: Callable[[JsonFields], AltUpConfig] | None = None
    row_scales: Callable[[ModelConfig, JsonFields], Iterable[RowScale]] | None = None
    # Returns fields with the names that other families have.
    rename: Callable[[JsonFields], JsonFields] | None = None
