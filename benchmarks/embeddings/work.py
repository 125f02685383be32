"""Products of numbers that texts need at least: those of matrices and of attention."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from baton.checkpoint.checkpoint import Shape
from baton.checkpoint.hub import open_checkpoint
from baton.core.pooling import PoolingKind
from baton.engine.runner.encoders.config import EncoderConfig
from baton.engine.runner.encoders.read_config import is_encoder, read_encoder_config
from baton.engine.runner.encoders.weight_loading import encoder_shapes
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.weights.decoder_weights import expected_tensors

LAYER = re.compile(r"\blayers?\.(\d+)\.")
KEYS_AND_VALUES = re.compile(r"\b(k_proj|v_proj)\.")


def products_of(model: Path, texts: Sequence[str]) -> int:
    """Return the products of the texts' tokens, in a dense model."""
    checkpoint = open_checkpoint(str(model))
    tokenizer, limit = checkpoint.load_tokenizer(), None
    config: EncoderConfig | ModelConfig
    shapes: Mapping[str, Shape]
    if is_encoder(checkpoint):
        config = read_encoder_config(checkpoint)
        limit, shapes = config.max_text_len, encoder_shapes(config)
    else:
        config = read_model_config(checkpoint)
        shapes = expected_tensors(config)
    lens = [len(tokenizer.encode(text)[:limit]) for text in texts]
    matrices = {
        name: torch.Size(shape).numel()
        for name, shape in shapes.items()
        if len(shape) == 2 and LAYER.search(name)
    }
    num_layers = len(config.layers)
    pooling = checkpoint.read_pooling()
    is_last_token = pooling is not None and pooling.kind is PoolingKind.LAST
    products = sum(lens) * sum(matrices.values())
    if is_last_token:  # the other tokens need only keys and values of the last layer
        other = sum(
            count
            for name, count in matrices.items()
            if f".{num_layers - 1}." in name and not KEYS_AND_VALUES.search(name)
        )
        products -= (sum(lens) - len(lens)) * other
    pairs = sum(
        length * length if limit is not None else length * (length + 1) // 2 for length in lens
    )
    size = config.num_heads * config.head_dim
    return products + 2 * pairs * size * num_layers
