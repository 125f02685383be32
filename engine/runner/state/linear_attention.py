"""Recurrent layers over states in blocks: the Protocol of their kernels and the torch reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.model.mixers import LinearAttentionPass
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.state.state_tables import ZEROS, StateLayout


class LinearAttention(Protocol):
    """Recurrent layers over the states in one KV tensor."""

    def begin(self, layout: StateLayout, inputs: StepInputs = SHARED_INPUTS) -> LinearAttentionPass:
        """Put the arrays of a pass. It reads their tensors only after `inputs` are sent."""
        ...


class TorchLinearAttention:
    """Reference implementation. Chunks change its results by rounding in float32."""

    def __init__(self, kv: Tensor, shape: StateShape) -> None:
        self._kv = kv
        self._shape = shape

    def begin(self, layout: StateLayout, inputs: StepInputs = SHARED_INPUTS) -> LinearAttentionPass:
        return _TorchStatePass(self._kv, self._shape, layout, inputs)


class _Batch(NamedTuple):
    """Runs with the same number of tokens, none of which reads what another one writes."""

    tokens: Tensor  # [runs, tokens]: flat indices
    reads: Tensor  # [runs, blocks]
    writes: Tensor


class _TorchStatePass:
    def __init__(
        self, kv: Tensor, shape: StateShape, layout: StateLayout, inputs: StepInputs
    ) -> None:
        self._shape = shape
        self._dtype = shape.conv_dtype
        row_numbers = shape.config.value_dim
        flat = kv.view(len(kv), -1).view(torch.float32)
        used = flat[:, : shape.rows_per_block * row_numbers]
        self._rows = used.unflatten(1, (shape.rows_per_block, row_numbers))
        self._batches = list(_batches(layout, inputs))

    def mix(self, layer: int, weights: RecurrentRule, projected: Tensor, gates: Tensor) -> Tensor:
        config, first_row = self._shape.config, layer * self._shape.layer_rows
        channels = weights.channels(config, projected)
        output = torch.empty(len(projected), config.num_values, device=projected.device)
        for batch in self._batches:
            inputs = self._load_inputs(batch, first_row + self._shape.matrix_rows, channels)
            state = self._read(batch.reads, first_row, self._shape.matrix_rows)
            state = state.unflatten(1, (config.num_value_heads, config.key_dim))
            output[batch.tokens], state = weights.apply(
                config, weights.convolve(inputs), gates[batch.tokens], state
            )
            self._write(batch.writes, first_row, state)
        return weights.finish(config, output, projected).to(projected.dtype)

    def _load_inputs(self, batch: _Batch, row: int, channels: Tensor) -> Tensor:
        """Return the channels of the batch after those before it, and keep the last ones."""
        shape, num_channels = self._shape, self._shape.config.num_channels
        num_kept = shape.config.conv_size - 1
        stored = self._read(batch.reads, row, shape.conv_rows).flatten(1).view(self._dtype)
        before = stored[:, : num_kept * num_channels].unflatten(1, (num_kept, num_channels))
        inputs = torch.cat((before, channels[batch.tokens]), dim=1)
        kept = inputs[:, inputs.shape[1] - num_kept :].flatten(1)
        kept = functional.pad(kept, (0, stored.shape[1] - kept.shape[1]))
        self._write(batch.writes, row, kept.view(torch.float32))
        return inputs

    def _read(self, tables: Tensor, first: int, count: int) -> Tensor:
        """Return rows of the states in these blocks, [runs, rows, numbers]."""
        rows = torch.arange(first, first + count, device=tables.device)
        offsets = rows % self._shape.rows_per_block
        found = self._rows[tables[:, rows // self._shape.rows_per_block], offsets]
        is_new = (tables[:, :1] == ZEROS)[:, :, None]
        cleaned: Tensor = found.masked_fill(is_new, 0.0)
        return cleaned

    def _write(self, tables: Tensor, first: int, numbers: Tensor) -> None:
        numbers = numbers.reshape(len(tables), -1, self._shape.config.value_dim)
        rows = torch.arange(first, first + numbers.shape[1], device=tables.device)
        offsets = rows % self._shape.rows_per_block
        self._rows[tables[:, rows // self._shape.rows_per_block], offsets] = numbers


def _batches(layout: StateLayout, inputs: StepInputs) -> Iterator[_Batch]:
    """Yield single tokens together, other runs one by one, and each sequence's runs in order."""
    singles, others = _split_runs(layout)
    for runs in (singles, *([run] for run in others)):
        if runs:
            num_tokens = int(layout.num_tokens[runs[0]])
            tokens = layout.first_tokens[runs][:, None] + np.arange(num_tokens)
            arrays = (tokens, layout.reads[runs], layout.writes[runs])
            yield _Batch(*(inputs.put(array) for array in arrays))


def _split_runs(layout: StateLayout) -> tuple[list[int], list[int]]:
    """Return the first runs of sequences that have one token, and all other runs."""
    first_runs = set(layout.first_runs.tolist())
    num_tokens: list[int] = layout.num_tokens.tolist()
    singles = [i for i, count in enumerate(num_tokens) if count == 1 and i in first_runs]
    return singles, [i for i in range(len(num_tokens)) if i not in set(singles)]
