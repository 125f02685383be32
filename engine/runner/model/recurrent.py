"""Recurrent layers: their weights and their mathematics in torch.

A head's state is a matrix S that maps keys to values. A token with key k, written value w, query q
and decay a replaces it by a * S + k * w and reads S q. Rules differ in what a token writes:

- Gated delta rule: a token with value v and write strength b writes b * (v - a * S k). The values
  that the tokens of a chunk write solve a triangular system.
- Mamba2: a token with key k (B), value v (x), query q (C) and step t (dt) decays the state by
  exp(-rate * t), writes t * v and reads its own value, too, times a weight of the head (D).

A short convolution has no such matrix, only the inputs of its last tokens.

Between the projections of a layer, all numbers are float32: a key that is nearly orthogonal to its
query decides the sign of what a first token reads, and the norm makes it as large as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm

CHUNK = 64  # tokens that are computed together
NORM_EPSILON = 1e-6  # for queries and keys of the delta rule


class Heads(NamedTuple):
    """Outputs of the convolution in float32, each [sequences, heads, tokens, ..]."""

    query: Tensor  # by key head
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a layer by the gated delta rule."""

    gates: Linear  # rows of write strengths, then of decays
    conv: Tensor  # [conv_size, channels] in float32, the oldest token first
    decay_bias: Tensor  # [value heads] in float32
    decay_rate: Tensor  # [value heads] in float32
    norm: Norm  # for a head's output, before its gate
    conv_bias: None = None

    def apply(
        self, config: RecurrentConfig, heads: Heads, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, [sequences, value heads, tokens, value_dim], and the new state."""
        strengths, decays = gates.chunk(2, dim=2)
        inputs = (
            _repeat_heads(config, _unit_length(heads.query)) * config.key_dim**-0.5,
            _repeat_heads(config, _unit_length(heads.key)),
            heads.value,
            self._log_decay(decays).transpose(1, 2),
            strengths.float().sigmoid().transpose(1, 2),
        )
        return _apply_in_chunks(_apply_delta, inputs, state)

    def finish(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the RMS norm of each head, times SiLU of its gate.

        The output, [tokens, value heads, value_dim], is float32. The gates and the result are of
        the model's dtype.
        """
        normed = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + self.norm.epsilon)
        weighted = self.norm.weight.float() * normed
        return (weighted * functional.silu(gates.float())).to(gates.dtype)

    def _log_decay(self, gates: Tensor) -> Tensor:
        return -self.decay_rate * functional.softplus(gates.float() + self.decay_bias)


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Weights of a Mamba2 layer, with the methods of `DeltaWeights`.

    Vectors are float32. One number of a head is in `step_bias`, `decay_rate` and `skip`.
    """

    gates: Linear  # rows of steps
    conv: Tensor
    conv_bias: Tensor  # [channels]
    step_bias: Tensor
    decay_rate: Tensor
    skip: Tensor
    norm: Norm  # for the output of all heads of a group, after their gates

    def apply(
        self, config: RecurrentConfig, heads: Heads, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps = functional.softplus(gates.float() + self.step_bias)
        inputs = (
            _repeat_heads(config, heads.query),
            _repeat_heads(config, heads.key),
            heads.value * steps.transpose(1, 2)[..., None],
            (-self.decay_rate * steps).transpose(1, 2),
        )
        output, state = _apply_in_chunks(_apply_mamba, inputs, state)
        return output + self.skip[:, None, None] * heads.value, state

    def finish(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the RMS norm of each group of heads, after their gates."""
        gated = (output * functional.silu(gates.float())).flatten(1)
        groups = gated.unflatten(1, (config.num_key_heads, -1))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.norm.epsilon)
        weighted: Tensor = self.norm.weight * (groups * scale).flatten(1)
        return weighted.to(gates.dtype).view(gates.shape)


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """Weights of a short convolution over products of two projections, times its gates."""

    gates: Linear
    conv: Tensor
    conv_bias: None = None


MatrixWeights = DeltaWeights | MambaWeights
RecurrentWeights = MatrixWeights | ShortConvWeights


def convolve(inputs: Tensor, weights: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the causal convolution of [sequences, conv_size - 1 + tokens, channels] in float32."""
    conv_size = len(weights)
    num_tokens = inputs.shape[1] - conv_size + 1
    total = torch.zeros(1, device=inputs.device)
    for tap, weight in enumerate(weights.float()):
        total = total + weight * inputs[:, tap : tap + num_tokens].float()
    if bias is not None:
        total = total + bias
    return total


def split_heads(config: RecurrentConfig, mixed: Tensor) -> Heads:
    """Split [sequences, tokens, channels] into heads."""
    sizes = config.num_keys, config.num_keys, config.num_values
    dims = config.key_dim, config.key_dim, config.value_dim
    return Heads(
        *(
            each.unflatten(2, (-1, dim)).transpose(1, 2)
            for each, dim in zip(mixed.split(sizes, dim=2), dims, strict=True)
        )
    )


class _Decays(NamedTuple):
    """Decays within a chunk, [sequences, heads, ..]."""

    from_state: Tensor  # [.., tokens, 1]: from the state to each token
    between: Tensor  # [.., tokens, tokens]: from the second token to the first one, or 0
    to_end: Tensor  # [.., tokens, 1]: from each token to the end
    whole: Tensor  # [.., 1, 1]


def _unit_length(heads: Tensor) -> Tensor:
    """Divide each head by its length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPSILON)


def _apply_delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    decays = _chunk_decays(log_decay)
    system = strength[..., None] * (key @ key.mT) * decays.between
    wanted = strength[..., None] * (value - decays.from_state * (key @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return _read_and_write(query, key, written, decays, state)


def _apply_mamba(
    query: Tensor, key: Tensor, written: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return _read_and_write(query, key, written, _chunk_decays(log_decay), state)


def _repeat_heads(config: RecurrentConfig, heads: Tensor) -> Tensor:
    """Repeat each key head for its value heads."""
    return heads.repeat_interleave(config.num_value_heads // config.num_key_heads, dim=1)


def _apply_in_chunks(
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


def _chunk_decays(log_decay: Tensor) -> _Decays:
    num_tokens = log_decay.shape[2]
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=log_decay.device).triu()
    # Sums of their own: differences of sums since the start are inexact after large ones.
    between = log_decay[..., None].expand(*log_decay.shape, num_tokens)
    between = between.masked_fill(is_later, 0.0).cumsum(-2)
    between = between.masked_fill(is_later.triu(1), float("-inf")).exp()
    since_start = log_decay.cumsum(-1)
    return _Decays(
        since_start.exp()[..., None],
        between,
        between[..., -1, :, None],
        since_start[..., -1].exp()[..., None, None],
    )


def _read_and_write(
    query: Tensor, key: Tensor, written: Tensor, decays: _Decays, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what a chunk's queries read, and the state after its tokens wrote their values."""
    output = decays.from_state * (query @ state)
    output = output + ((query @ key.mT) * decays.between) @ written
    return output, decays.whole * state + (key * decays.to_end).mT @ written
