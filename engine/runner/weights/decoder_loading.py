"""Loads a decoder from weight files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from baton.checkpoint.checkpoint import Tensors
from baton.engine.kv_cache.groups import LayerPlace
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.model.altup import stream_layers
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.per_layer import extend_layers
from baton.engine.runner.model.rank_group import DividedVocabulary
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.weights.decoder_weights import (
    check_tensors,
    load_decoder_weights,
    record,
)
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap

AdaptLayers = Callable[
    [ModelConfig, Sequence[Layer], Sequence[DecoderLayer]], Sequence[DecoderLayer]
]


def load_decoder(
    config: ModelConfig,
    files: Tensors,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
    adapt: AdaptLayers | None = None,
    tensors: TensorMap | None = None,
) -> Decoder:
    """Check all tensors before the first one is read, then copy each to its place once.

    `adapt` returns layers that adapters can change. `tensors` are those of checked files.
    """
    if tensors is None:
        recorded = check_tensors(config, files)
        tensors = TensorMap(config, files.shapes())
    else:
        recorded = record(tensors)
    loader = TensorLoader(
        files,
        target,
        norm=config.norm,
        quantization=config.quantization,
        row_scales=tensors.row_scales(),
        on_progress=on_progress,
        num_expected=recorded.num_loaded,
    )
    weights = load_decoder_weights(tensors, loader, target.parts.ops, target.group)
    embedding, layers, parts = _vocabulary(weights.embedding, target), weights.layers, target.parts
    head = embedding if weights.head is None else _vocabulary(weights.head, target)
    mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
    made = parts.make_layers(config, layers)
    if adapt is not None:
        made = adapt(config, layers, made)
    if weights.streams is None:
        made = extend_layers(config, parts.ops, layers, made)
    else:
        made = stream_layers(config, parts.ops, weights.streams, layers, made)
    waits = any(list(map(parts.waits_for_experts, mixtures)))  # of all: this joins the experts
    # The kernels of GPUs are those of experts with gates.
    waits = waits or (bool(mixtures) and not config.activation.is_gated)
    classifier = weights.classifier
    if config.label_tokens is not None:
        classifier = _label_row(files, tensors, config.label_tokens).to(target.device)
    return Decoder(
        config,
        parts.ops,
        embedding,
        made,
        weights.norm,
        head,
        waits,
        classifier,
        weights.per_layer,
    )


def _vocabulary(part: Linear, target: LoadTarget) -> Linear:
    """Return the embedding or LM head, of which each rank has some rows."""
    if target.group is None:
        return part
    return DividedVocabulary(part, target.vocab_size, target.group)


def _label_row(files: Tensors, tensors: TensorMap, tokens: tuple[int, int]) -> torch.Tensor:
    """Return the classifier whose logit is that of the second token less that of the first one."""
    head, embedding = f"{tensors.head}.weight", f"{tensors.embedding}.weight"
    name = head if head in files.shapes() else embedding
    less, more = (files.part(name, token).float() for token in tokens)
    return (more - less)[None]


def attention_of(config: ModelConfig, files: Tensors, device: torch.device) -> list[LayerAttention]:
    """Return the attention of each layer that has it, with its sinks."""
    tensors, layers = TensorMap(config, files.shapes()), []
    for place, index in zip(config.kv_places(), config.attention_layers, strict=True):
        layer = layer_attention(config, index, place)
        if config.has_sinks:
            name = tensors.in_layer(index, tensors.names.sinks)
            layer = replace(layer, sinks=files.tensor(name).float().to(device))
        layers.append(layer)
    return layers


def layer_attention(config: ModelConfig, index: int, place: LayerPlace) -> LayerAttention:
    """Return the attention of a layer, without sinks."""
    layer = config.layers[index]
    return LayerAttention(
        config.attention_scale,
        layer.window,
        layer.chunk,
        config.attention_softcap,
        None,
        place.group,
        place.place,
        value_dim=None if config.latent is None else config.latent.rank,
        kv_heads=layer.kv_heads,
        sees_whole_pictures=layer.sees_whole_pictures,
    )
