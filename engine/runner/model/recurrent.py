"""Recurrent layers: the Protocol of their weights and the mathematics that their rules share.

A head's state is a matrix S that maps keys to values. A token with key k, written value w, query q
and decay a replaces it by a * S + k * w and reads S q. Rules differ in what a token writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import Linear

CHUNK = 64  # tokens that are computed together


class Heads(NamedTuple):
    """Outputs of the convolution in float32, each [sequences, heads, tokens, ..]."""

    query: Tensor  # of key heads
    key: Tensor
    value: Tensor


class RecurrentWeights(Protocol):
    """Weights of a layer that only recurrent layers have, and its rule."""

    @property
    def gates(self) -> Linear: ...

    @property
    def conv(self) -> Tensor:
        """Return weights of [conv_size, channels] in float32, the oldest token first."""
        ...

    @property
    def conv_bias(self) -> Tensor | None: ...

    def apply(
        self, config: RecurrentConfig, heads: Heads, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, [sequences, value heads, tokens, value_dim], and the new state."""
        ...

    def finish(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the normalised and gated output of [tokens, value heads, value_dim].

        The output is float32, the gates and the result are of the model's dtype.
        """
        ...


class Decays(NamedTuple):
    """Decays within a chunk, [sequences, heads, ..]."""

    from_state: Tensor  # [.., tokens, 1]: from the state to each token
    between: Tensor  # [.., tokens, tokens]: from the second token to the first one, or 0
    to_end: Tensor  # [.., tokens, 1]: from each token to the end
    whole: Tensor  # [.., 1, 1]


def convolve(inputs: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return SiLU of the causal convolution of [sequences, conv_size - 1 + tokens, channels]."""
    conv_size = len(weights)
    num_tokens = inputs.shape[1] - conv_size + 1
    total = torch.zeros(1, device=inputs.device)
    for tap, weight in enumerate(weights.float()):
        total = total + weight * inputs[:, tap : tap + num_tokens].float()
    if bias is not None:
        total = total + bias
    return functional.silu(total.to(inputs.dtype))


def split_heads(config: RecurrentConfig, mixed: Tensor) -> Heads:
    """Split [sequences, tokens, channels] into heads."""
    sizes = config.num_keys, config.num_keys, config.num_values
    dims = config.key_dim, config.key_dim, config.value_dim
    return Heads(
        *(
            each.float().unflatten(2, (-1, dim)).transpose(1, 2)
            for each, dim in zip(mixed.split(sizes, dim=2), dims, strict=True)
        )
    )


def repeat_heads(config: RecurrentConfig, heads: Tensor) -> Tensor:
    """Repeat each key head for its value heads."""
    return heads.repeat_interleave(config.num_value_heads // config.num_key_heads, dim=1)


def apply_in_chunks(
    apply_chunk: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply a rule to chunks of its inputs, each [sequences, heads, tokens, ..], in turn.

    The third one are values. Returns the outputs and the new state.
    """
    outputs = [torch.zeros_like(inputs[2][:, :, :0])]
    for first in range(0, inputs[0].shape[2], CHUNK):
        output, state = apply_chunk(*(each[:, :, first : first + CHUNK] for each in inputs), state)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def chunk_decays(log_decay: Tensor) -> Decays:
    num_tokens = log_decay.shape[2]
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=log_decay.device).triu()
    # Sums of their own: differences of sums since the start are inexact after large ones.
    between = log_decay[..., None].expand(*log_decay.shape, num_tokens)
    between = between.masked_fill(is_later, 0.0).cumsum(-2)
    between = between.masked_fill(is_later.triu(1), float("-inf")).exp()
    since_start = log_decay.cumsum(-1)
    return Decays(
        since_start.exp()[..., None],
        between,
        between[..., -1, :, None],
        since_start[..., -1].exp()[..., None, None],
    )


def read_and_write(
    query: Tensor, key: Tensor, written: Tensor, decays: Decays, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a chunk's queries read, and the state after its tokens wrote their values."""
    output = decays.from_state * (query @ state)
    output = output + ((query @ key.mT) * decays.between) @ written
    return output, decays.whole * state + (key * decays.to_end).mT @ written
