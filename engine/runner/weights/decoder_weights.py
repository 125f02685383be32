"""Weights of a decoder: which tensors of a folder they are, and their loading."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Expected, Shape, Tensors
from baton.checkpoint.weight_files import FLOATS
from baton.core.errors import ModelError
from baton.engine.runner.model.altup import StreamProjections
from baton.engine.runner.model.config import AltUpConfig, ModelConfig, PerLayerConfig
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.per_layer import PerLayerInputs
from baton.engine.runner.model.quantization import Packing
from baton.engine.runner.model.rank_group import RankGroup
from baton.engine.runner.weights.layer_loading import load_layer
from baton.engine.runner.weights.loader import Stack, WeightLoader
from baton.engine.runner.weights.packed import (
    PackedPart,
    PartAxis,
    is_packed,
    mxfp4_parts,
    packed_parts,
)
from baton.engine.runner.weights.tensor_names import TensorMap

CLASSIFIER = "score"


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a model, or of a rank's part of it."""

    embedding: Linear
    layers: Sequence[Layer]
    norm: Norm
    head: Linear | None  # None: the embedding
    streams: StreamProjections | None
    classifier: Tensor | None
    per_layer: PerLayerInputs | None


def load_decoder_weights(
    tensors: TensorMap, loader: WeightLoader, ops: Ops, group: RankGroup | None = None
) -> DecoderWeights:
    config, names = tensors.config, tensors.names
    hidden = config.hidden_size

    def vocabulary(name: str) -> Linear:
        return loader.embedding(Stack([name], [config.vocab_size], hidden))

    has_classifier = config.num_labels > 0 and config.label_tokens is None
    scores = Stack([CLASSIFIER], [config.num_labels], hidden)
    return DecoderWeights(
        embedding=vocabulary(tensors.embedding),
        layers=[load_layer(tensors, loader, index, group) for index in range(config.num_layers)],
        norm=loader.norm(f"{tensors.prefix}{names.norm}", hidden),
        head=None if config.ties_embeddings else vocabulary(tensors.head),
        streams=None if config.altup is None else _load_streams(config.altup, tensors, loader),
        classifier=loader.matrix(scores, torch.float32) if has_classifier else None,
        per_layer=_load_inputs(config.per_layer, tensors, loader, ops)
        if config.per_layer
        else None,
    )


def _load_streams(
    config: AltUpConfig, tensors: TensorMap, loader: WeightLoader
) -> StreamProjections:
    names, hidden = tensors.names.altup, tensors.config.hidden_size

    def linear(kind: str, numbers: Sequence[int]) -> Linear:
        stored = [f"{tensors.prefix}{kind}.{number}" for number in numbers]
        return loader.linear(Stack(stored, [hidden] * len(stored), hidden, is_sensitive=True))

    others = range(config.num_streams - 1)
    unembed = [linear(names.unembed_projections, [number]) for number in others]
    return StreamProjections(linear(names.projections, others), unembed)


def _load_inputs(
    config: PerLayerConfig, tensors: TensorMap, loader: WeightLoader, ops: Ops
) -> PerLayerInputs:
    names, prefix, num_layers = tensors.names.per_layer, tensors.prefix, tensors.config.num_layers
    size, hidden = num_layers * config.size, tensors.config.hidden_size
    return PerLayerInputs(
        ops,
        num_layers,
        loader.rows(Stack([f"{prefix}{names.embedding}"], [config.vocab_size], size)),
        loader.linear(Stack([f"{prefix}{names.projection}"], [size], hidden)),
        loader.norm(f"{prefix}{names.norm}", config.size),
        config.placeholder_id,
        None if config.has_every_token else config.vocab_size,
    )


def record(tensors: TensorMap) -> WeightLoader:
    """Return what the weights of a model are loaded from."""
    recorder = WeightLoader()
    load_decoder_weights(tensors, recorder, Ops())
    return recorder


def record_layer(tensors: TensorMap, index: int) -> WeightLoader:
    recorder = WeightLoader()
    load_layer(tensors, recorder, index)
    return recorder


def check_tensors(config: ModelConfig, files: Tensors) -> WeightLoader:
    """Raise ModelError unless the files hold every tensor in its shape, and no other.

    Returns what the weights are loaded from.
    """
    tensors = TensorMap(config, files.shapes())
    recorded = record(tensors)
    stored = {
        part.name: Expected(part.shape, part.dtypes)
        for parts in stored_parts(tensors, recorded.shapes(), files.names()).values()
        for part in parts
    }
    files.check(stored, tensors.is_ignored)
    return recorded


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of a new folder's tensors."""
    return record(TensorMap(config)).shapes()


def stored_parts(
    tensors: TensorMap, shapes: Mapping[str, Shape], names: Collection[str]
) -> dict[str, Sequence[PackedPart]]:
    """Return each tensor as it is stored: a quantized matrix consists of several parts."""
    names = frozenset(names)
    return {
        name: list(_packed_parts(tensors, name, shape, names))
        or [PackedPart.of(name, shape, FLOATS, *map(PartAxis, range(len(shape))))]
        for name, shape in shapes.items()
    }


def _packed_parts(
    tensors: TensorMap, name: str, shape: Shape, names: Collection[str]
) -> Iterator[PackedPart]:
    """Yield the tensors that store a quantized matrix, or nothing if `name` is not quantized."""
    linear, how = name.removesuffix(".weight"), tensors.config.quantization
    if how is None or not is_packed(linear, names, how):
        return
    if len(shape) == 2 and how.packing is not Packing.MXFP4:
        yield from packed_parts(linear, shape, names, how)
    elif len(shape) == 3 and how.packing is Packing.MXFP4:
        experts = tensors.names.experts
        is_transposed = experts is not None and experts.is_transposed
        yield from mxfp4_parts(linear, shape, is_transposed=is_transposed)
    else:
        raise ModelError(f"{name} of {how.packing.value} is not supported")
