"""Mixers: the part of a layer in which tokens of a sequence see each other.

A mixer is attention of a kind or a recurrent rule. The decoder and the layers do not know which.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from baton.engine.runner.model.adapters import Group, restrict_groups
from baton.engine.runner.model.config import LatentConfig, LayerConfig, ModelConfig, QkNorm
from baton.engine.runner.model.layer_weights import LatentProjections, Layer
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.rope import Angles

T = TypeVar("T")


class AttentionPass(Protocol):
    """Attention of one forward pass. Its masks are built once and shared by all layers."""

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Write the tokens' keys and values, [tokens, kv_heads, head_dim], into their blocks.

        Without values, the keys contain them: see `LayerAttention.value_dim`.
        """
        ...

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Return the attention output of `query`, [tokens, heads, head_dim], in the same shape.

        If keys contain their values, its last dimension is `value_dim`.

        Call it after `write`. A token attends to its own sequence up to itself, within the layer's
        window. Blocks and slots outside a sequence's context can hold any value, NaN included, and
        must not affect the output.
        """
        ...


class LinearAttentionPass(Protocol):
    """Recurrent layers of one forward pass."""

    def mix(self, layer: int, weights: RecurrentRule, projected: Tensor, gates: Tensor) -> Tensor:
        """Return the output of the recurrent layer with this number, [tokens, values].

        Reads and writes the states of the layer; blocks to write can hold any value.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ends:
    """Tokens whose hidden states are needed, with an attention pass over them alone."""

    indices: Tensor  # in the flat batch
    attention: AttentionPass


@dataclass(slots=True, eq=False)
class ForwardPass:
    """Values that the layers of a forward pass share."""

    angles: Sequence[Angles]  # by RoPE; a row per token
    attention: AttentionPass
    linear_attention: LinearAttentionPass | None = None  # if the model has recurrent layers
    groups: Sequence[Group] | None = None  # tokens with adapters, if there can be any
    per_layer_inputs: Tensor | None = None  # [tokens, layers, size], of models that have them
    _made: dict[Hashable, object] = field(default_factory=dict)
    positions: Tensor | None = None  # by token; None: the angles say all

    def once(self, make: Callable[[ForwardPass], T]) -> T:
        """Return what `make` returns for this pass. It is called for the first layer that asks."""
        if make not in self._made:
            self._made[make] = make(self)
        return cast("T", self._made[make])

    def restrict_to(self, ends: Ends) -> ForwardPass:
        """Return the pass over only these tokens."""
        angles = [(cos[ends.indices], sin[ends.indices]) for cos, sin in self.angles]
        groups = None if self.groups is None else restrict_groups(self.groups, ends.indices)
        per_layer = self.per_layer_inputs
        return replace(
            self,
            angles=angles,
            attention=ends.attention,
            groups=groups,
            per_layer_inputs=None if per_layer is None else per_layer[ends.indices],
            _made={},
        )


class Mixer(Protocol):
    """Mixes the tokens of each sequence of a pass."""

    def mix(self, forward_pass: ForwardPass, inputs: Tensor, ends: Ends | None) -> Tensor:
        """Return the layer's output for normalised inputs, before its last projection.

        With `ends`, it is the output of those tokens alone, and nothing if there are none. In any
        case all tokens write what later ones need.
        """
        ...


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Attention with keys and values of several heads."""

    config: ModelConfig
    ops: Ops
    layer: Layer
    own: LayerConfig
    number: int  # the layer's, among those with attention

    def mix(self, forward_pass: ForwardPass, inputs: Tensor, ends: Ends | None) -> Tensor:
        if self.own.kv_layer is not None:
            return self._read_alone(forward_pass, inputs, ends)
        config, has_values = self.config, self.own.has_value_projection
        heads = [config.num_heads, *[config.num_kv_heads] * (2 if has_values else 1)]
        if config.has_output_gate:
            heads.append(config.num_heads)
        by_head = self.layer.qkv(inputs).view(len(inputs), -1, config.head_dim)
        split: tuple[Tensor, ...] = by_head.split(heads, dim=1)
        query, key, *others = split
        value, gates = (others[0], others[1:]) if has_values else (key, others)
        if self.layer.v_norm is not None:
            value = self._norm_heads(value, self.layer.v_norm)
        is_rotated = ends is None and self.own.query_rope == self.own.key_rope
        key_angles = forward_pass.angles[self.own.key_rope]
        if is_rotated:
            query, key = self._apply_ropes(query, key, key_angles)
        else:
            key = self._apply_rope(key, self.layer.k_norm, key_angles)
        forward_pass.attention.write(self.number, key, value)
        if ends is not None:
            forward_pass = forward_pass.restrict_to(ends)
            query, gates = query[ends.indices], [gate[ends.indices] for gate in gates]
            if not len(query):
                return query
        if not is_rotated:
            angles = forward_pass.angles[self.own.query_rope]
            query = self._apply_rope(query, self.layer.q_norm, angles)
        attended = forward_pass.attention.attend(self.number, query).flatten(1)
        return self.ops.multiply_sigmoid(attended, gates[0].flatten(1)) if gates else attended

    def _read_alone(self, forward_pass: ForwardPass, inputs: Tensor, ends: Ends | None) -> Tensor:
        """Attend to the keys and values of another layer."""
        if ends is not None:
            forward_pass, inputs = forward_pass.restrict_to(ends), inputs[ends.indices]
            if not len(inputs):
                return inputs.new_empty(0, self.config.num_heads * self.config.head_dim)
        query = self.layer.qkv(inputs).view(len(inputs), -1, self.config.head_dim)
        angles = forward_pass.angles[self.own.query_rope]
        query = self._apply_rope(query, self.layer.q_norm, angles)
        return forward_pass.attention.attend(self.number, query).flatten(1)

    def _norm_heads(self, heads: Tensor, norm: Norm) -> Tensor:
        rows = heads.reshape(-1, heads.shape[2])
        return self.ops.rms_norm(rows, norm).view(heads.shape)

    def _apply_ropes(self, query: Tensor, key: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        if self.own.qk_norm is QkNorm.ROTATED:
            norms = self.layer.q_norm, self.layer.k_norm
            query, key = map(self._norm_rotated, (query, key), norms, (angles, angles))
            return query, key
        query, q_norm = self._norm_all_heads(query, self.layer.q_norm)
        key, k_norm = self._norm_all_heads(key, self.layer.k_norm)
        return self.ops.apply_ropes((query, key), (q_norm, k_norm), angles)

    def _apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        if self.own.qk_norm is QkNorm.ROTATED:
            return self._norm_rotated(heads, norm, angles)
        heads, norm = self._norm_all_heads(heads, norm)
        return self.ops.apply_rope(heads, norm, angles)

    def _norm_rotated(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        rotated = self.ops.apply_rope(heads, None, angles)
        return rotated if norm is None else self._norm_heads(rotated, norm)

    def _norm_all_heads(self, heads: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Apply a norm over all heads of a token. Return a norm of single heads for RoPE."""
        if norm is not None and self.own.qk_norm is QkNorm.ALL_HEADS:
            return self.ops.rms_norm(heads.flatten(1), norm).view(heads.shape), None
        return heads, norm


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """Multi-head latent attention (MLA) in absorbed form: attention over the latents themselves.

    The scores of a head are products of its keys, which are projections of the latents. Instead of
    the latents, the query is projected. Likewise, the sum of a head's values is the projection of a
    sum of latents. So all heads share one key per token, whose leading numbers are the value.
    """

    config: LatentConfig
    projections: LatentProjections
    ops: Ops
    layer: Layer
    own: LayerConfig
    number: int  # the layer's, among those with attention

    def mix(self, forward_pass: ForwardPass, inputs: Tensor, ends: Ends | None) -> Tensor:
        rank, rope_dim = self.config.rank, self.config.rope_dim
        projected = self.layer.qkv(inputs)
        sizes = [projected.shape[1] - rank - rope_dim, rank, rope_dim]
        query, latent, key = torch.split(projected, sizes, dim=1)
        latent = self._apply_norm(latent, self.layer.k_norm)
        angles = forward_pass.angles[self.own.key_rope]
        rotated = self.ops.apply_rope(key[:, None], None, angles)
        cached = torch.cat((latent[:, None], rotated), dim=2)  # [tokens, 1, rank + rope_dim]
        forward_pass.attention.write(self.number, cached, None)
        if ends is not None:
            forward_pass, query = forward_pass.restrict_to(ends), query[ends.indices]
            if not len(query):
                return query
        query = self._project_query(query, forward_pass.angles[self.own.query_rope])
        attended = forward_pass.attention.attend(self.number, query)
        return self.projections.value(attended).flatten(1)

    def _project_query(self, query: Tensor, angles: Angles) -> Tensor:
        """Return queries of the cached keys, [tokens, heads, rank + rope_dim]."""
        if self.projections.query is not None:
            query = self.projections.query(self._apply_norm(query, self.layer.q_norm))
        sizes = self.config.nope_dim, self.config.rope_dim
        plain, rotated = query.view(len(query), -1, sum(sizes)).split(sizes, dim=2)
        rotated = self.ops.apply_rope(rotated, None, angles)
        return torch.cat((self.projections.key(plain), rotated), dim=2)

    def _apply_norm(self, numbers: Tensor, norm: Norm | None) -> Tensor:
        return numbers if norm is None else self.ops.rms_norm(numbers, norm)


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """Layer with a state: the rule is that of the weights."""

    qkv: Linear
    weights: RecurrentRule
    number: int  # the layer's, among the recurrent ones

    def mix(self, forward_pass: ForwardPass, inputs: Tensor, ends: Ends | None) -> Tensor:
        assert forward_pass.linear_attention is not None
        gates = self.weights.gates(inputs)
        projected = self.qkv(inputs)
        mixed = forward_pass.linear_attention.mix(self.number, self.weights, projected, gates)
        return mixed if ends is None else mixed[ends.indices]


@dataclass(frozen=True, slots=True)
class ParallelMixer:
    """Attention and a recurrent rule side by side. The outputs are the columns of one."""

    attention: Mixer
    state: Mixer

    def mix(self, forward_pass: ForwardPass, inputs: Tensor, ends: Ends | None) -> Tensor:
        read = self.state.mix(forward_pass, inputs, ends)
        attended = self.attention.mix(forward_pass, inputs, ends)
        return torch.cat((attended, read), dim=1) if len(read) else read


def make_mixer(config: ModelConfig, ops: Ops, layer: Layer, index: int) -> Mixer:
    """Make the mixer of the layer with this index."""
    if layer.recurrent is not None:
        number = config.recurrent_layers.index(index)
        if layer.state_inputs is not None:
            attention = make_mixer(config, ops, replace(layer, recurrent=None), index)
            state = RecurrentMixer(layer.state_inputs, layer.recurrent, number)
            return ParallelMixer(attention, state)
        return RecurrentMixer(layer.qkv, layer.recurrent, number)
    number, own = config.attention_number(index), config.layers[index]
    if config.latent is not None and layer.latent is not None:
        return LatentMixer(config.latent, layer.latent, ops, layer, own, number)
    return AttentionMixer(config.of_layer(index), ops, layer, own, number)
