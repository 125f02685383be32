"""Parts of a model that torch computes although its kernels are native."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.engine.runner.kernels.native_linear import native_experts, native_matrix
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Layer, ParallelMoe
from baton.engine.runner.model.linear import Linear, Mlp, parts_of
from baton.engine.runner.model.rank_group import own_part

EMBEDDING_SCALE = "scale of the embeddings"
LOGITS_SCALE = "scale of the logits"
LOGITS_SOFTCAP = "soft cap of the logits"
ROPE_BY_LENGTH = "angles of a RoPE that depends on the length"
COLUMN_ORDER = "order of columns (GPTQ with act-order)"
EXPERT_SUM = "sum over the experts"
EXPERT_SCALES = "scales of the experts"
PER_LAYER_INPUTS = "sums of the inputs per layer"
STREAMS = "streams of AltUp"
SPARSE_GATES = "choice of sparse gates"
LAYER_SCALE = "scale of the layers"


def torch_parts(config: ModelConfig, layers: Sequence[Layer]) -> list[str]:
    """Return the names of these parts, each once."""
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    linears = [linear for layer in layers for linear in _linears(layer)]
    has_part = {
        EMBEDDING_SCALE: config.embedding_scale != 1.0,
        LOGITS_SCALE: config.logits_scale != 1.0,
        LOGITS_SOFTCAP: config.logits_softcap is not None,
        ROPE_BY_LENGTH: config.depends_on_length,
        COLUMN_ORDER: any(native_matrix(linear) is None for linear in linears),
        EXPERT_SCALES: any(isinstance(layer.mlp, ParallelMoe) for layer in layers),
        PER_LAYER_INPUTS: config.per_layer is not None,
        STREAMS: config.altup is not None,
        SPARSE_GATES: any(layer.gate_deviations is not None for layer in config.layers),
        LAYER_SCALE: config.has_layer_scale and bool(mixtures),
        EXPERT_SUM: any(native_experts(moe.experts) is None for moe in mixtures),
    }
    return [part for part, is_there in has_part.items() if is_there]


def _linears(layer: Layer) -> Iterator[Linear]:
    linears = [layer.qkv, own_part(layer.output)]
    if layer.state_inputs is not None:
        linears.append(layer.state_inputs)
    if layer.recurrent is not None:
        linears.append(layer.recurrent.gates)
    for linear in linears:
        yield from parts_of(linear)
    if layer.latent is not None and layer.latent.query is not None:
        yield layer.latent.query
    mlps = [*(() if layer.mixture is None else layer.mixture.experts)]
    if isinstance(layer.mlp, Mlp):
        mlps.append(layer.mlp)
    elif isinstance(layer.mlp, ParallelMoe):
        mlps.append(layer.mlp.dense)
    for mlp in mlps:
        yield from (*parts_of(mlp.gate_up), own_part(mlp.down))
