"""Linear layers that pooled hidden states pass, such as the projection of ColBERT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.checkpoint import Checkpoint, Expected
from baton.checkpoint.weight_files import FLOATS, WeightFiles
from baton.core.errors import ModelError
from baton.core.pooling import DenseLayer
from baton.engine.runner.model_info import ModelInfo

WEIGHT, BIAS = "linear.weight", "linear.bias"


@dataclass(frozen=True, slots=True)
class LoadedDense:
    weight: Tensor
    bias: Tensor | None
    has_tanh: bool

    def __call__(self, vectors: Tensor) -> Tensor:
        vectors = functional.linear(vectors, self.weight, self.bias)
        return vectors.tanh() if self.has_tanh else vectors


def load_dense(info: ModelInfo, device: torch.device | None = None) -> Sequence[LoadedDense]:
    """Load the layers of a model's pooling, in float32. Raises ModelError."""
    layers = info.pooling.dense if info.pooling is not None else ()
    size = info.hidden_size
    for layer in layers:
        if layer.num_inputs != size:
            where = info.checkpoint.path / layer.folder
            raise ModelError(
                f"{where}: the layer takes {layer.num_inputs} numbers; the one before it gives "
                f"{size}: fetch the folder again"
            )
        size = layer.num_outputs
    return [_load(info.checkpoint, layer, device) for layer in layers]


def apply_dense(vectors: Tensor, layers: Sequence[LoadedDense]) -> Tensor:
    for layer in layers:
        vectors = layer(vectors)
    return vectors


def _load(checkpoint: Checkpoint, layer: DenseLayer, device: torch.device | None) -> LoadedDense:
    expected = {WEIGHT: Expected((layer.num_outputs, layer.num_inputs), FLOATS)}
    if layer.has_bias:
        expected[BIAS] = Expected((layer.num_outputs,), FLOATS)
    with WeightFiles(checkpoint.path / layer.folder) as files:
        files.check(expected, lambda _: not layer.folder)  # else beside the tensors of the model
        weight, *bias = (files.tensor(name).float().to(device) for name in expected)
    return LoadedDense(weight, bias[0] if bias else None, layer.has_tanh)
