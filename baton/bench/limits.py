"""How fast a model could be computed if the machine did nothing but what cannot be left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine.runner.config import read_model_config
from engine.runner.tensors import expected_tensors

BYTES_OF_NUMBER = {"none": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class Work:
    """What a step costs at least: every matrix is read once, every token is multiplied by it."""

    layer_numbers: int
    head_numbers: int
    bytes_of_number: float

    def seconds(
        self, num_tokens: int, num_sampled: int, bytes_per_s: float, flops_per_s: float
    ) -> float:
        """Reading and multiplying can be done at the same time."""
        numbers = self.layer_numbers + self.head_numbers
        products = self.layer_numbers * num_tokens + self.head_numbers * num_sampled
        reading_s = numbers * self.bytes_of_number / bytes_per_s
        return max(reading_s, 2 * products / flops_per_s)


def work_of(folder: Path, quantize: str) -> Work:
    """Of the matrices; norms and embeddings that are looked up count nothing."""
    config = read_model_config(folder)
    shapes = expected_tensors(config)
    layers = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name.startswith("model.layers.") and len(shape) > 1
    )
    head = config.vocab_size * config.hidden_size
    return Work(layers, head, BYTES_OF_NUMBER[quantize])
