"""Mixers: the part of a layer in which tokens of a sequence see each other.

A mixer is attention of a kind or a recurrent rule. The decoder and the layers do not know which.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, cast

from torch import Tensor

from baton.engine.runner.attention.paged_attention import AttentionPass
from baton.engine.runner.model.config import ModelConfig, QkNorm
from baton.engine.runner.model.latent import latent_key, latent_query, split_latent
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.state.linear_attention import LinearAttentionPass

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ends:
    """Tokens whose hidden states are needed, with an attention pass over them alone."""

    places: Tensor  # flat indices
    attention: AttentionPass


@dataclass(slots=True, eq=False)
class ForwardPass:
    """Values that the layers of a forward pass share."""

    angles: Sequence[Angles]  # of the tokens, for each RoPE
    attention: AttentionPass
    linear_attention: LinearAttentionPass | None = None  # of a model with recurrent layers
    _made: dict[Hashable, object] = field(default_factory=dict)

    def once(self, make: Callable[[ForwardPass], T]) -> T:
        """Return what `make` returns for this pass. It is called for the first layer that asks."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast("T", self._made[make])

    def restrict_to(self, ends: Ends) -> ForwardPass:
        """Return the pass over only these tokens."""
        angles = [(cos[ends.places], sin[ends.places]) for cos, sin in self.angles]
        return replace(self, angles=angles, attention=ends.attention, _made={})


class Mixer(Protocol):
    """Mixes the tokens of each sequence of a pass."""

    # False: after `write`, `mix` can compute some of the tokens alone.
    needs_all_tokens: bool

    def mix(self, forward_pass: ForwardPass, inputs: Tensor) -> Tensor:
        """Return the layer's output for normalised inputs, before its last projection."""
        ...

    def write(self, forward_pass: ForwardPass, inputs: Tensor) -> None:
        """Only write what later tokens need. Not if all tokens are needed."""
        ...


class AttentionMixer:
    """Attention with keys and values of several heads."""

    needs_all_tokens = False

    def __init__(
        self, config: ModelConfig, ops: Ops, layer: Layer, index: int, number: int
    ) -> None:
        self._config = config
        self._ops = ops
        self._layer = layer
        self._own = config.layers[index]
        self._number = number  # of the layer among those with attention

    def mix(self, forward_pass: ForwardPass, inputs: Tensor) -> Tensor:
        query, gate = self._write(forward_pass, inputs)
        angles = forward_pass.angles[self._own.query_rope]
        query = self._apply_rope(query, self._layer.q_norm, angles)
        attended = forward_pass.attention.attend(self._number, query).flatten(1)
        return attended if gate is None else self._ops.multiply_sigmoid(attended, gate.flatten(1))

    def write(self, forward_pass: ForwardPass, inputs: Tensor) -> None:
        self._write(forward_pass, inputs)

    def _write(self, forward_pass: ForwardPass, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write keys and values; return queries before norm and rotation, and output gates."""
        config = self._config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        if config.has_output_gate:
            heads.append(config.num_heads)
        by_head = self._layer.qkv(inputs).view(len(inputs), -1, config.head_dim)
        split: tuple[Tensor, ...] = by_head.split(heads, dim=1)
        query, key, value, *gates = split
        key = self._apply_rope(key, self._layer.k_norm, forward_pass.angles[self._own.key_rope])
        forward_pass.attention.write(self._number, key, value)
        return query, gates[0] if gates else None

    def _apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        if norm is not None and self._own.qk_norm is QkNorm.ALL_HEADS:
            heads = self._ops.rms_norm(heads.flatten(1), norm).view(heads.shape)
            norm = None
        return self._ops.apply_rope(heads, norm, angles)


class LatentMixer:
    """Multi-head latent attention: see `model.latent`."""

    needs_all_tokens = False

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        layer: Layer,
        index: int,
        number: int,
    ) -> None:
        assert config.latent is not None
        assert layer.latent is not None
        self._latent = config.latent
        self._ops = ops
        self._layer = layer
        self._projections = layer.latent
        self._own = config.layers[index]
        self._number = number

    def mix(self, forward_pass: ForwardPass, inputs: Tensor) -> Tensor:
        query = self._write(forward_pass, inputs)
        angles, norm = forward_pass.angles[self._own.query_rope], self._layer.q_norm
        query = latent_query(self._latent, self._ops, self._projections, query, norm, angles)
        attended = forward_pass.attention.attend(self._number, query)
        return self._projections.value(attended).flatten(1)

    def write(self, forward_pass: ForwardPass, inputs: Tensor) -> None:
        self._write(forward_pass, inputs)

    def _write(self, forward_pass: ForwardPass, inputs: Tensor) -> Tensor:
        query, values, key = split_latent(self._latent, self._layer.qkv(inputs))
        angles = forward_pass.angles[self._own.key_rope]
        key = latent_key(self._ops, values, key, self._layer.k_norm, angles)
        forward_pass.attention.write(self._number, key, None)
        return query


class RecurrentMixer:
    """Linear attention or Mamba2: the rule is that of the weights."""

    needs_all_tokens = True  # for the state

    def __init__(self, layer: Layer, number: int) -> None:
        assert layer.recurrent is not None
        self._qkv = layer.qkv
        self._weights = layer.recurrent
        self._number = number  # of the layer among the recurrent ones

    def mix(self, forward_pass: ForwardPass, inputs: Tensor) -> Tensor:
        assert forward_pass.linear_attention is not None
        gates = self._weights.gates(inputs)
        projected = self._qkv(inputs)
        return forward_pass.linear_attention.mix(self._number, self._weights, projected, gates)

    def write(self, forward_pass: ForwardPass, inputs: Tensor) -> None:
        raise NotImplementedError("a recurrent layer computes all tokens")


def make_mixer(config: ModelConfig, ops: Ops, layer: Layer, index: int) -> Mixer:
    """Make the mixer of the layer with this index."""
    if layer.recurrent is not None:
        return RecurrentMixer(layer, config.recurrent_layers.index(index))
    number = config.attention_layers.index(index)
    if config.latent is not None:
        return LatentMixer(config, ops, layer, index, number)
    return AttentionMixer(config, ops, layer, index, number)
