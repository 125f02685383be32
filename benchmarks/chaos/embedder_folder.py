"""Small embedder with random weights: the further model of a chaos run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Shape
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.engine.runner.encoders.read_config import read_encoder_config
from baton.engine.runner.encoders.weight_loading import encoder_shapes
from tools.make_model import StoredTensor, write_tokenizer, write_weights

CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "dtype": "float32",
}
MODULES = (
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
)
STD = 0.15  # of weights: large enough for embeddings of texts to differ


def make_embedder(folder: Path) -> None:
    """Write a BERT in the layout of sentence-transformers."""
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "modules.json").write_text(json.dumps(MODULES))
    pooling = {"pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    write_tokenizer(folder)
    shapes = encoder_shapes(read_encoder_config(SafetensorsFolder(folder)))
    tensors = {name: _stored(name, shape) for name, shape in shapes.items()}
    write_weights(folder / "model.safetensors", tensors, 0, lambda _written, _total: None)


def _stored(name: str, shape: Shape) -> StoredTensor:
    mean = 1.0 if name.endswith("LayerNorm.weight") else 0.0

    def draw(part: Shape, generator: torch.Generator) -> Tensor:
        return torch.randn(part, generator=generator).mul_(STD).add_(mean)

    return StoredTensor(shape, "F32", draw, torch.float32.itemsize)
