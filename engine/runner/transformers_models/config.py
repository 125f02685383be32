"""Configuration of a model on transformers' modules, read from the calls that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baton.checkpoint.json_fields import MAX_INT
from baton.engine.kv_cache.groups import KvHeads
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.families.read_config import MAX_LAYERS
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
    decoder_of,
    find_model_class,
    make_empty_model,
    one_line,
    read_transformers_config,
    split_model,
)
from baton.engine.runner.transformers_models.outline import ModelOutline, UnsupportedModel, refuse

# In them the angles of all tokens change when a text, or one of the same batch, becomes longer than
# those of the training.
ROPES_BY_LENGTH = ("dynamic", "longrope")
NUM_TOKENS = 3  # of the pass without numbers
# Parts of the names of modules in which tokens see each other outside of attention.
STATEFUL_MODULES = ("Mamba", "Conv1d", "Recurrent", "DeltaNet", "Lightning", "Rwkv", "Indexer")


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    """A decoder on transformers' modules. Only what the KV cache needs has a meaning to Baton."""

    fields: str = ""  # config.json
    calls: tuple[AttentionCall, ...] = ()  # by layer
    head_dims: tuple[int, ...] = ()  # in the KV cache, by layer

    def attention(self, sinks: Sequence[Tensor | None]) -> list[LayerAttention]:
        return [
            LayerAttention(
                call.scale,
                call.window,
                softcap=call.softcap,
                sinks=own_sinks,
                kv_group=place.group,
                index_in_block=place.place,
                kv_heads=layer.kv_heads,
            )
            for place, layer, call, own_sinks in zip(
                self.kv_places(), self.layers, self.calls, sinks, strict=True
            )
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
    num_layers = _read_size(config, "num_hidden_layers", MAX_LAYERS)
    max_len = _read_max_len(config)
    _fix_angles(config)
    model = make_empty_model(model_class, config, RECORDED)
    _check_layers(model)
    calls, output, hidden_size, vocab_size = _run_empty(model)
    _check_calls(calls, num_layers)
    return InspectedModel(
        _config_of(outline, calls, hidden_size, vocab_size, max_len),
        model_class,
        output,
        sum(each.numel() for each in model.parameters()),
    )


def _read_size(config: Any, name: str, limit: int) -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or not 1 <= found <= limit:
        raise UnsupportedModel(f"{name} is {found}: it must be from 1 to {limit}")
    return found


def _read_max_len(config: Any) -> int:
    """Return the longest text whose angles do not depend on its length."""
    longest = _read_size(config, "max_position_embeddings", MAX_INT)
    for rope in _ropes_by_length(config):
        longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return longest


def _fix_angles(config: Any) -> None:
    """Let angles not depend on the length, to compare which takes numbers."""
    for rope in _ropes_by_length(config):
        rope["rope_type"] = "default"


def _ropes_by_length(config: Any) -> list[dict[str, Any]]:
    ropes = getattr(config, "rope_parameters", None) or {}
    each = [ropes, *ropes.values()]  # one for all layers, or one for each type of them
    return [
        rope for rope in each if isinstance(rope, dict) and rope.get("rope_type") in ROPES_BY_LENGTH
    ]


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
    if any(call.num_heads % call.num_kv_heads for call in calls):
        raise UnsupportedModel("the number of its KV heads does not divide that of its heads")


def _config_of(
    outline: ModelOutline,
    calls: Sequence[AttentionCall],
    hidden_size: int,
    vocab_size: int,
    max_len: int,
) -> TransformersConfig:
    heads = [_heads_of(call) for call in calls]
    first, are_alike = calls[0], len(set(heads)) == 1
    return TransformersConfig(
        architecture=outline.architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=heads[0].dim,
        max_position_embeddings=max_len,
        norm=NormConfig(0.0),
        ropes=(),
        rotary_dim=heads[0].dim,
        is_rope_interleaved=False,
        layers=tuple(
            LayerConfig(window=call.window, kv_heads=None if are_alike else own)
            for call, own in zip(calls, heads, strict=True)
        ),
        activation=Activation.SILU,
        moe=None,
        attention_scale=first.scale,
        ties_embeddings=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_sinks=any(call.has_sinks for call in calls),
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
        calls=tuple(calls),
        head_dims=tuple(each.dim for each in heads),
    )


def _heads_of(call: AttentionCall) -> KvHeads:
    """Return the KV heads of a layer. One size holds keys and values, and is even for kernels."""
    dim = max(call.key_dim, call.value_dim)
    return KvHeads(call.num_kv_heads, dim + dim % 2)
