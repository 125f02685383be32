"""Rotary position embedding (RoPE) with its scaling variants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.runner.model.config import ModelConfig, QueryTemperature, RopeConfig

MIN_TABLE_POSITIONS = 1024

Angles = tuple[Tensor, Tensor]  # cosines and sines, each [tokens, 1, head_dim]


class Ropes:
    """Computes the angles of all RoPEs of a model, once per pass for all layers."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        longest = config.max_position_embeddings
        self._ropes = [
            Rope(rope, *_sizes(config, number), longest, device, dtype)
            for number, rope in enumerate(config.ropes)
        ]
        self.depends_on_length = config.depends_on_length
        self.has_grid_positions = config.has_grid_positions

    def angles(
        self, positions: Tensor, seen_lens: Tensor | None, num_positions: int
    ) -> tuple[Angles, ...]:
        """Return the angles of each RoPE of the configuration; see `Rope.angles`."""
        return tuple(rope.angles(positions, seen_lens, num_positions) for rope in self._ropes)


class Rope:
    """Computes cosines and sines of positions.

    RoPE pairs dimension i of a head with dimension i + head_dim / 2. `head_order` brings the heads
    of models that pair others, or that rotate only some dimensions, into this order. Dimensions
    that are not rotated have the angle zero.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        rotary_dim: int,
        max_position_embeddings: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._rotary_dim = rotary_dim
        self._num_unrotated = (head_dim - rotary_dim) // 2  # in half a head
        self._trained_len = max_position_embeddings
        self._dtype = dtype
        self._scale = _scale(config)
        self._frequencies = _frequencies(config, rotary_dim).to(device)
        self._table: Angles | None = None  # for positions from 0 on
        self._axes = _axes(config, head_dim, rotary_dim).to(device)  # of M-RoPE, by dimension

    def angles(self, positions: Tensor, seen_lens: Tensor | None, num_positions: int) -> Angles:
        """Return (cos, sin), each [tokens, 1, head_dim]. All positions are below `num_positions`.

        Only kinds that depend on the length use `seen_lens`: the sequence length at which each
        token is first computed. For prompt tokens that is the length of the whole prompt, whatever
        its chunks; for an output token it is the sequence up to and including the token.
        """
        if seen_lens is not None and self._config.depends_on_length:
            return self._compute_angles(positions, self._frequencies_at(seen_lens))
        cos, sin = self._table_of(num_positions)
        if positions.dim() > 1:  # [3, tokens]: of time, rows and columns
            return self._choose(cos[positions]), self._choose(sin[positions])
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _choose(self, by_axis: Tensor) -> Tensor:
        """Return for each dimension the number of its axis: [3, tokens, 1, head_dim] → [tokens, …].

        They are those of the table, so that text has the same bits as without pictures.
        """
        chosen = self._axes.expand(by_axis.shape[1:])
        return by_axis.gather(0, chosen[None])[0]

    def _table_of(self, num_positions: int) -> Angles:
        if self._table is None or self._table[0].shape[0] < num_positions:
            table_len = max(MIN_TABLE_POSITIONS, 1 << (num_positions - 1).bit_length())
            positions = torch.arange(table_len, device=self._frequencies.device)
            self._table = self._compute_angles(positions, self._frequencies)
        return self._table

    def _compute_angles(self, positions: Tensor, frequencies: Tensor) -> Angles:
        half = positions[:, None].float() * frequencies
        cos, sin = half.cos() * self._scale, half.sin() * self._scale
        if self._num_unrotated:
            rest = cos.new_ones(len(cos), self._num_unrotated)
            cos, sin = torch.cat((cos, rest), dim=-1), torch.cat((sin, 0 * rest), dim=-1)
        if self._config.temperature is not None:
            scales = _query_scales(self._config.temperature, positions)
            cos, sin = cos * scales, sin * scales
        cos, sin = (torch.cat((each, each), dim=-1)[:, None, :] for each in (cos, sin))
        return cos.to(self._dtype), sin.to(self._dtype)

    def _frequencies_at(self, seen_lens: Tensor) -> Tensor:
        if self._config.kind == "longrope":
            is_long = seen_lens > self._config.original_max_position_embeddings
            long = _longrope(self._config, self._rotary_dim, self._config.long_factors)
            return torch.where(is_long[:, None], long.to(seen_lens.device), self._frequencies)
        lens, indices = seen_lens.clamp(min=self._trained_len).unique(return_inverse=True)
        # One length at a time: the last bits of torch's powers depend on the batch size.
        by_len = torch.stack([self._scaled_frequencies(seen_len) for seen_len in lens.tolist()])
        return by_len.to(indices.device)[indices]

    def _scaled_frequencies(self, seen_len: int) -> Tensor:
        factor, dim = self._config.factor, self._rotary_dim
        stretch = (factor * seen_len / self._trained_len) - (factor - 1)
        base: float = self._config.theta * stretch ** (dim / (dim - 2))
        return 1.0 / (base ** _exponents(dim))


def _sizes(config: ModelConfig, rope: int) -> tuple[int, int]:
    """Return the size of a head of the layers with a RoPE, and how many dimensions rotate."""
    users = [
        i for i, layer in enumerate(config.layers) if rope in (layer.query_rope, layer.key_rope)
    ]
    own = config.of_layer(users[0])
    return own.rope_head_dim, own.rotary_dim


def _axes(config: RopeConfig, head_dim: int, rotary_dim: int) -> Tensor:
    """Return the axis by which each dimension of a head rotates, or 0."""
    half = torch.zeros(head_dim // 2, dtype=torch.int64)
    if config.sections and config.are_sections_interleaved:
        for axis in (1, 2):
            half[axis : 3 * config.sections[axis] : 3] = axis
    elif config.sections:
        sizes = torch.tensor(config.sections)
        half[: int(sizes.sum())] = torch.arange(len(sizes)).repeat_interleave(sizes)
    half[rotary_dim // 2 :] = 0
    return torch.cat((half, half))


def head_order(config: ModelConfig) -> list[int] | None:
    """Return the stored dimension of each dimension of a head, or None if they are the same.

    Attention scores do not depend on the order of dimensions that queries and keys share.
    """
    dim, rotary_dim = config.rope_head_dim, config.rotary_dim
    rotated, rest = range(rotary_dim), range(rotary_dim, dim)
    first, second = rotated[: rotary_dim // 2], rotated[rotary_dim // 2 :]
    if config.is_rope_interleaved:
        first, second = rotated[::2], rotated[1::2]
    half = len(rest) // 2
    order = [*first, *rest[:half], *second, *rest[half:]]
    return None if order == list(range(dim)) else order


def repeat_order(order: Sequence[int], num_heads: int) -> list[int]:
    """Return the order of dimensions of several heads, from that of one head."""
    return [len(order) * head + dimension for head in range(num_heads) for dimension in order]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to [tokens, heads, head_dim] (the NeoX style: first half with second half)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float) / dim


def _query_scales(temperature: QueryTemperature, positions: Tensor) -> Tensor:
    steps = torch.floor((positions.float() + temperature.offset) / temperature.period)
    return 1 + temperature.gain * torch.log1p(steps)[:, None]


def _frequencies(config: RopeConfig, dim: int) -> Tensor:
    if config.kind == "none":
        return torch.zeros(dim // 2)
    plain = 1.0 / (config.theta ** _exponents(dim))
    if config.kind == "proportional":
        plain[int(config.rotated_share * dim // 2) :] = 0
        return plain / config.factor
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, dim)
    if config.kind == "longrope":
        return _longrope(config, dim, config.short_factors)
    return plain  # dynamic equals default until a sequence exceeds the trained length


def _scale(config: RopeConfig) -> float:
    """Return the factor of cosines and sines."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        trained = config.original_max_position_embeddings
        ratio = math.log(config.factor) / math.log(trained) if config.factor > 1 else 0.0
        return math.sqrt(1 + ratio)
    if config.mscale and config.mscale_all_dim:
        return config.mscale_of(config.mscale) / config.mscale_of(config.mscale_all_dim)
    return config.mscale_of(1.0)


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Scale low frequencies, keep high ones and interpolate between them (Llama 3)."""
    trained = config.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / config.factor + blend * plain
    is_slow, is_fast = wavelength > trained / low, wavelength < trained / high
    return torch.where(is_slow, plain / config.factor, torch.where(is_fast, plain, blended))


def _longrope(config: RopeConfig, dim: int, factors: tuple[float, ...]) -> Tensor:
    """Divide each frequency by its own factor (LongRoPE)."""
    return 1.0 / (torch.tensor(factors) * config.theta ** _exponents(dim))


def _yarn(config: RopeConfig, dim: int) -> Tensor:
    """Keep dimensions with many rotations, scale those with few and interpolate (YaRN)."""
    powers = config.theta ** _exponents(dim)
    low, high = (_yarn_dimension(config, dim, b) for b in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float) - low) / width).clamp(0, 1)
    return (1.0 / (config.factor * powers)) * (1 - keep) + (1.0 / powers) * keep


def _yarn_dimension(config: RopeConfig, dim: int, num_rotations: float) -> float:
    trained = config.original_max_position_embeddings
    turns = math.log(trained / (num_rotations * 2 * math.pi))
    return dim * turns / (2 * math.log(config.theta))
