"""Rules with a matrix as state, and their computation in chunks of tokens.

A head's state is a matrix S that maps keys to values. A token with key k, written value w, query q
and decay a replaces it by a * S + k * w and reads S q. Rules differ in what a token writes, and in
whether all channels of a key have one decay.

Between the projections of a layer, all numbers are float32: a key that is nearly orthogonal to its
query decides the sign of what a first token reads, and the norm makes it as large as any other.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.recurrent.rule import RecurrentRule


class Decays(NamedTuple):
    """Decays within a chunk, [sequences, heads, ..], of each channel of a key or of all at once."""

    from_state: Tensor  # [.., tokens, channels]: from the state to each token
    between: Tensor  # [.., tokens, tokens, channels]: from the second token to the first one, or 0
    to_end: Tensor  # [.., tokens, channels]: from each token to the end
    whole: Tensor  # [.., channels, 1]

    def products(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the products of each with each other vector, after the decay between them."""
        if self.between.shape[-1] == 1:
            return (one @ other.mT) * self.between[..., 0]
        return (one[..., None, :] * other[..., None, :, :] * self.between).sum(-1)


@dataclass(frozen=True, slots=True)
class MatrixRule(RecurrentRule):
    """Rule by which a token writes a value at its key.

    The channels are all queries, all keys and all values. Output gates follow in the projection.
    """

    chunk: ClassVar[int] = 64  # tokens that are computed together

    decay_rate: Tensor  # [value heads] in float32
    norm: Norm | None  # for the output

    def channels(self, config: RecurrentConfig, projected: Tensor) -> Tensor:
        return projected[:, : config.num_channels]

    def apply(
        self, config: RecurrentConfig, mixed: Tensor, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        sizes = config.num_keys, config.num_keys, config.num_values
        dims = config.key_dim, config.key_dim, config.value_dim
        query, key, value = (
            each.unflatten(2, (-1, dim)).transpose(1, 2)
            for each, dim in zip(functional.silu(mixed).split(sizes, dim=2), dims, strict=True)
        )
        query, key = self.scale(config, query, key)
        log_decay, strength = (each.transpose(1, 2) for each in self.factors(gates))
        if log_decay.dim() == 3:
            log_decay = log_decay[..., None]
        group_size = config.num_value_heads // config.num_key_heads
        query, key = (each.repeat_interleave(group_size, dim=1) for each in (query, key))
        outputs = [torch.zeros_like(value[:, :, :0])]
        for first in range(0, value.shape[2], self.chunk):
            q, k, v, decay, factor = (
                each[:, :, first : first + self.chunk]
                for each in (query, key, value, log_decay, strength)
            )
            decays = _chunk_decays(decay)
            written = self.write(k, v, factor[..., None], decays, state)
            read = (decays.from_state * q) @ state
            outputs.append(read + decays.products(q, k) @ written)
            state = decays.whole * state + (k * decays.to_end).mT @ written
        output = self.read(torch.cat(outputs, dim=2), value)
        return output.transpose(1, 2).flatten(2), state

    def finish(self, config: RecurrentConfig, output: Tensor, projected: Tensor) -> Tensor:
        sizes = config.num_value_heads, config.value_dim
        gates = projected[:, config.num_channels :].unflatten(1, sizes)
        return self.gate(config, output.unflatten(1, sizes), self.activate(gates.float()))

    def activate(self, gates: Tensor) -> Tensor:
        """Apply the function of output gates."""
        return functional.silu(gates)

    def scale(self, config: RecurrentConfig, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Scale queries and keys, [sequences, key heads, tokens, key_dim]."""
        return query, key

    @abstractmethod
    def factors(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return logarithms of decays, and write strengths: [sequences, tokens, value heads].

        The decays can have a further dimension, of the channels of a key.
        """

    @abstractmethod
    def write(
        self, key: Tensor, value: Tensor, strength: Tensor, decays: Decays, state: Tensor
    ) -> Tensor:
        """Return what the tokens of a chunk write, [sequences, value heads, tokens, value_dim]."""

    def read(self, output: Tensor, value: Tensor) -> Tensor:
        """Return the tokens' outputs for what they read: [sequences, value heads, tokens, ..]."""
        return output

    @abstractmethod
    def gate(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the norm of [tokens, value heads, value_dim] with gates, as [tokens, values]."""


def _chunk_decays(log_decay: Tensor) -> Decays:
    num_tokens = log_decay.shape[2]
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=log_decay.device).triu()
    # Sums of their own: differences of sums since the start are inexact after large ones.
    between = log_decay[:, :, :, None].expand(-1, -1, -1, num_tokens, -1)
    between = between.masked_fill(is_later[..., None], 0.0).cumsum(2)
    between = between.masked_fill(is_later.triu(1)[..., None], float("-inf")).exp()
    since_start = log_decay.cumsum(2)
    return Decays(
        since_start.exp(), between, between[:, :, -1], since_start[:, :, -1].exp()[..., None]
    )
