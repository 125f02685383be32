"""Roofline of a model: the time of a step that only reads weights and KV and multiplies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine.runner.families.read_config import read_model_config
from engine.runner.weights.tensor_names import expected_tensors

BYTES_OF_NUMBER = {"none": 2.0, "int8": 1.0, "int4": 0.5}  # of weights
KV_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step."""

    num_tokens: int
    num_sampled: int
    num_slots: int  # slots whose keys and values are read
    num_pairs: int  # pairs of a token and a slot it attends to


def prompt_of(num_tokens: int) -> StepWork:
    return StepWork(num_tokens, 1, num_tokens, num_tokens * (num_tokens + 1) // 2)


def batch_of(num_sequences: int, context_len: int) -> StepWork:
    num_slots = num_sequences * context_len
    return StepWork(num_sequences, num_sequences, num_slots, num_slots)


@dataclass(frozen=True, slots=True)
class Work:
    """Minimum cost of a step: each matrix and each slot is read once and multiplied."""

    layer_numbers: int
    head_numbers: int
    bytes_of_number: float
    slot_numbers: int  # keys and values
    pair_products: int

    def seconds(self, load: StepWork, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the longer of read time and compute time, which can overlap."""
        numbers = self.layer_numbers + self.head_numbers
        read = numbers * self.bytes_of_number + self.slot_numbers * KV_NUMBER_BYTES * load.num_slots
        products = (
            self.layer_numbers * load.num_tokens
            + self.head_numbers * load.num_sampled
            + self.pair_products * load.num_pairs
        )
        return max(read / bytes_per_s, 2 * products / flops_per_s)


def work_of(folder: Path, quantize: str) -> Work:
    """Return the work of a model. Norms, embedding look-ups and attention windows are ignored."""
    config = read_model_config(folder)
    shapes = expected_tensors(config)
    layers = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name.startswith("model.layers.") and len(shape) > 1
    )
    both = 2 * config.num_layers * config.head_dim  # keys and values, or scores and sums
    return Work(
        layers,
        config.vocab_size * config.hidden_size,
        BYTES_OF_NUMBER[quantize],
        slot_numbers=both * config.num_kv_heads,
        pair_products=both * config.num_heads,
    )
