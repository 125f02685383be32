"""Configuration of a model on transformers' modules, read from the calls that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baton.engine.kv_cache.groups import layer_places
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.model.config import (
    Activation,
    LayerConfig,
    ModelConfig,
    NormConfig,
)
from baton.engine.runner.transformers_models.attention_calls import (
    RECORDED,
    AttentionCall,
    recorded_calls,
)
from baton.engine.runner.transformers_models.model_class import (
    find_model_class,
    make_empty_model,
    one_line,
    read_transformers_config,
)
from baton.engine.runner.transformers_models.outline import ModelOutline
from baton.engine.runner.transformers_models.refusals import UnsupportedModel, refuse
from baton.engine.runner.transformers_models.split_model import decoder_of, split_model

NUM_TOKENS = 3  # of the pass without numbers
# Parts of the names of modules in which tokens see each other outside of attention.
STATEFUL_MODULES = ("Mamba", "Conv1d", "Recurrent", "DeltaNet", "Lightning", "Rwkv", "Indexer")


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """A decoder on transformers' modules. Only what the KV cache needs has a meaning to Baton."""

    fields: str = ""  # config.json
    scales: tuple[float, ...] = ()  # of attention, by layer
    softcaps: tuple[float | None, ...] = ()

    def attention(self) -> list[LayerAttention]:
        places = layer_places(self.kv_groups())
        each = zip(places, self.layers, self.scales, self.softcaps, strict=True)
        return [
            LayerAttention(
                scale,
                layer.window,
                softcap=softcap,
                kv_group=place.group,
                index_in_block=place.place,
            )
            for place, layer, scale, softcap in each
        ]


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """A model whose pass was run without numbers."""

    config: TransformersConfig
    model_class: Any
    output: type  # of the decoder
    num_parameters: int


def inspect_model(outline: ModelOutline) -> InspectedModel:
    """Find out what a model's layers keep. Raises ModelError for one that cannot run."""
    try:
        return _inspect(outline)
    except UnsupportedModel as reason:
        raise refuse(outline.architecture, reason) from reason


def _inspect(outline: ModelOutline) -> InspectedModel:
    model_class = find_model_class(outline)
    config = read_transformers_config(model_class, outline)
    max_len = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_len, int) or max_len < 1:
        raise UnsupportedModel("its config.json names no max_position_embeddings")
    model = make_empty_model(model_class, config, RECORDED)
    _check_layers(model)
    calls, output, hidden_size, vocab_size = _run_empty(model)
    _check_calls(calls, config.num_hidden_layers)
    return InspectedModel(
        _config_of(outline, calls, hidden_size, vocab_size, max_len),
        model_class,
        output,
        sum(each.numel() for each in model.parameters()),
    )


def _check_layers(model: Any) -> None:
    stacks = [each for each in decoder_of(model).children() if isinstance(each, nn.ModuleList)]
    names = {type(module).__name__ for stack in stacks for module in stack.modules()}
    for name in sorted(names):
        if any(part in name for part in STATEFUL_MODULES):
            raise UnsupportedModel(f"its module {name} keeps a state besides keys and values")


def _run_empty(model: Any) -> tuple[list[AttentionCall], type, int, int]:
    """Return calls of attention, class of outputs, hidden size and size of the vocabulary."""
    ids = torch.zeros(NUM_TOKENS, dtype=torch.int64, device="meta")
    with recorded_calls() as calls, torch.inference_mode():
        try:
            # With a mask of ones, modules do not look for several texts in the positions.
            output = decoder_of(model)(
                input_ids=ids[None],
                position_ids=ids[None],
                attention_mask=torch.ones_like(ids)[None],
                use_cache=False,
            )
            split, num_calls = split_model(model, type(output)), len(calls)
            logits = split.logits(output.last_hidden_state[0])
        except UnsupportedModel:
            raise
        except Exception as error:  # any that a module of transformers raises
            raise UnsupportedModel(f"a pass without numbers fails: {one_line(error)}") from error
    if len(calls) > num_calls:
        raise UnsupportedModel("its head does not take the states of its decoder")
    return calls, type(output), output.last_hidden_state.shape[2], logits.shape[1]


def _check_calls(calls: Sequence[AttentionCall], num_layers: int) -> None:
    if len(calls) < num_layers:
        raise UnsupportedModel(
            f"{len(calls)} of its {num_layers} layers call AttentionInterface, and the KV cache "
            "does not hold what the others keep"
        )
    shapes = {(each.num_heads, each.num_kv_heads, each.key_dim, each.value_dim) for each in calls}
    if len(shapes) > 1:
        raise UnsupportedModel("its layers have heads of unlike numbers or sizes")
    if calls[0].key_dim != calls[0].value_dim:
        raise UnsupportedModel("its keys and values have unlike sizes")
    if calls[0].key_dim % 2 or calls[0].num_heads % calls[0].num_kv_heads:
        raise UnsupportedModel("its heads have a size or number that the kernels do not have")


def _config_of(
    outline: ModelOutline,
    calls: Sequence[AttentionCall],
    hidden_size: int,
    vocab_size: int,
    max_len: int,
) -> TransformersConfig:
    first = calls[0]
    return TransformersConfig(
        architecture=outline.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_dim,
        max_position_embeddings=max_len,
        norm=NormConfig(0.0),
        ropes=(),
        rotary_dim=first.key_dim,
        is_rope_interleaved=False,
        layers=tuple(LayerConfig(window=call.window) for call in calls),
        activation=Activation.SILU,
        moe=None,
        attention_scale=first.scale,
        ties_embeddings=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_sinks=False,
        attention_softcap=first.softcap,
        logits_softcap=None,
        logits_scale=1.0,
        embedding_scale=1.0,
        residual_scale=1.0,
        swiglu_alpha=0.0,
        swiglu_limit=0.0,
        dtype=outline.dtype,
        quantization=None,
        fields=outline.fields,
        scales=tuple(call.scale for call in calls),
        softcaps=tuple(call.softcap for call in calls),
    )
