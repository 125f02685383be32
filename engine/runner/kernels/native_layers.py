"""Fused native kernels: one call for decoder layers, or for the attention of one with experts."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.kv_cache.groups import LayerPlace
from baton.engine.runner.kernels.abi import (
    LayerArgs,
    PackedMatrix,
    PassArgs,
    RopeAngles,
    Struct,
    TapArgs,
)
from baton.engine.runner.kernels.calls import Kernels, gate_params, norm_params
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.kernels.native_attention import NativePass
from baton.engine.runner.kernels.native_linear import native_matrix
from baton.engine.runner.kernels.native_low_rank import FusedLowRank, first_place
from baton.engine.runner.kernels.torch_parts import torch_parts
from baton.engine.runner.model.config import ModelConfig, QkNorm
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import (
    DecoderLayer,
    LayerInput,
    Tap,
    UnfusedLayer,
    compute_output,
    gate_of,
    unfused_layers,
)
from baton.engine.runner.model.linear import Linear, Mlp
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.rank_group import RankGroup, SummedLinear, own_part

log = logging.getLogger(__name__)


def native_layers(
    kernels: Kernels, config: ModelConfig, layers: Sequence[Layer]
) -> Sequence[DecoderLayer]:
    """Return the layers, each of them fused where there are kernels for all of its parts.

    Logs the parts of the model that torch computes.
    """
    parts = torch_parts(config, layers)
    if parts:
        log.info("%s: torch computes the %s", config.architecture, ", the ".join(parts))
    made: list[DecoderLayer] = list(unfused_layers(NativeOps(kernels), config, layers))
    places = config.kv_places()
    fused = {
        number: _layer_args(config, index, layers[index], places[number])
        for number, index in enumerate(config.attention_layers)
        if _can_fuse(config, layers[index])
    }
    group = _rank_group_of(layers)
    passes = _FusedPasses(kernels, config, list(fused.values()), group)
    for number, args in fused.items():
        index = config.attention_layers[number]
        made[index] = FusedLayer(passes, layers[index], [args])
        before = made[index - 1] if index else None
        if isinstance(before, UnfusedLayer):  # fused layers compute their input norm
            made[index - 1] = replace(before, next_norm=None)
    return made


def _can_fuse(config: ModelConfig, layer: Layer) -> bool:
    """Return whether a layer has plain attention, an MLP and no reordered columns."""
    is_plain = layer.latent is None and not config.has_output_gate
    is_plain = is_plain and layer.mlp is not None and layer.recurrent is None
    is_plain = is_plain and layer.laurel is None and not config.has_parallel_mlp
    return is_plain and None not in [native_matrix(linear) for linear in _linears(layer)]


def _linears(layer: Layer) -> Iterator[Linear]:
    yield from (layer.qkv, own_part(layer.output))
    if isinstance(layer.mlp, Mlp):
        yield from (layer.mlp.gate_up, own_part(layer.mlp.down))
        if layer.per_layer is not None:
            yield from (layer.per_layer.gate, layer.per_layer.projection)


def _rank_group_of(layers: Sequence[Layer]) -> RankGroup | None:
    """Return the ranks that compute these layers together; None: one computes all."""
    groups = (each.output.group for each in layers if isinstance(each.output, SummedLinear))
    return next(groups, None)


class _FusedPasses:
    """Arguments of the fused layers of a pass, which share its buffers."""

    def __init__(
        self,
        kernels: Kernels,
        config: ModelConfig,
        layer_args: Sequence[Struct],
        group: RankGroup | None = None,
    ) -> None:
        self._ranks = {} if group is None else {"ranks": group.address}
        self.kernels = kernels
        self.config = config
        self.ops = NativeOps(kernels)
        query_rows = max([each.output.num_columns for each in layer_args], default=0)
        wide = [max(each.qkv.num_rows, each.gate_up.num_rows) for each in layer_args]
        gated = [each.down.num_columns for each in layer_args]
        self._buffer_sizes = (  # per token: see PassArgs
            max(config.hidden_size, query_rows),
            max([config.hidden_size, *wide]),
            max([query_rows, *gated]),
        )

    def begin(self, forward_pass: ForwardPass) -> _FusedPass:
        running = forward_pass.attention
        if not isinstance(running, NativePass):
            raise TypeError(f"fused layers need native attention, not {running!r}")
        attention = running.attention
        angles = [(cos.contiguous(), sin.contiguous()) for cos, sin in forward_pass.angles]
        pointers = [RopeAngles(cos.data_ptr(), sin.data_ptr()) for cos, sin in angles]
        by_rope = (RopeAngles * len(angles))(*pointers)
        low_rank = FusedLowRank(forward_pass.groups) if forward_pass.groups else None
        num_tokens = len(angles[0][0])
        buffers = [
            torch.empty(num_tokens, size, dtype=torch.bfloat16) for size in self._buffer_sizes
        ]
        own = forward_pass.per_layer_inputs
        own_inputs = {} if own is None else {"own_inputs": own.data_ptr()}
        if own is not None:
            own_inputs["own_inputs_stride"] = own.stride(0)
        by_group = [
            PassArgs(
                kv=kv,
                batch=batch,
                attention=ctypes.addressof(params),
                angles=ctypes.addressof(by_rope),
                narrow_buf=buffers[0].data_ptr(),
                wide_buf=buffers[1].data_ptr(),
                heads_buf=buffers[2].data_ptr(),
                num_threads=self.kernels.num_threads,
                **self._ranks,
                **own_inputs,
                **({} if low_rank is None else low_rank.args),
            )
            for kv, batch, params in zip(
                attention.kv, running.batches, attention.params, strict=True
            )
        ]
        args = (PassArgs * len(by_group))(*by_group)
        return _FusedPass(args, (angles, by_rope, buffers, running, low_rank, own))


class _FusedPass(NamedTuple):
    args: ctypes.Array[Struct]  # PassArgs by KV group
    alive: object  # owners of the memory that `args` points to


class FusedLayer:
    """Implements `DecoderLayer` and `CopiesInput` by one call, or two with experts.

    It can be several layers. Bit-identical to `UnfusedLayer` with the same kernels.
    """

    def __init__(
        self,
        passes: _FusedPasses,
        layer: Layer,
        args: Sequence[Struct],
        taps: Mapping[int, Tap] = {},
    ) -> None:
        """`args` are those of `layer`, and of any without experts that follow it. `taps`: by place
        in `args`.
        """
        self._library = passes.kernels.library
        self._passes = passes
        self._layer = layer
        self._taps = taps
        self._args = (LayerArgs * len(args))(*args)

    @property
    def adds_low_rank(self) -> bool:
        """Return whether there is one call, in which the products are added."""
        return isinstance(self._layer.mlp, Mlp)

    @property
    def extends_output(self) -> bool:
        return isinstance(self._layer.mlp, Mlp)

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        hidden_states = inputs.hidden_states.contiguous()
        pass_args = self._pass_args(forward_pass)
        taps = None
        if self._taps and (ends is not None or not isinstance(self._layer.mlp, Mlp)):
            self._taps[0](hidden_states).copy_(hidden_states)  # it is one layer alone
        elif self._taps:
            taps = self._tap_args(hidden_states)
        if ends is not None:
            if self._args[0].writes_kv:
                self._library.baton_layer_write_kv(self._args, pass_args, hidden_states.data_ptr())
            hidden_states = hidden_states[ends.indices]
            if not len(hidden_states):
                return LayerInput(hidden_states)
            forward_pass = forward_pass.restrict_to(ends)  # owns what the arguments point to
            pass_args = self._pass_args(forward_pass)
        if not isinstance(self._layer.mlp, Mlp):
            return LayerInput(self._through_experts(pass_args, hidden_states))
        given = inputs.normed if self._layer.input_norm is None else None
        given = None if given is None else given.contiguous()
        self._library.baton_layers(
            self._args,
            len(self._args),
            pass_args,
            hidden_states.data_ptr(),
            None if given is None else given.data_ptr(),
            taps,
        )
        return LayerInput(hidden_states)

    def joined(self, after: DecoderLayer) -> FusedLayer | None:
        if not (isinstance(after, FusedLayer) and self.adds_low_rank and after.adds_low_rank):
            return None
        taps = {len(self._args) + place: tap for place, tap in after._taps.items()}
        args = [*self._args, *after._args]
        return FusedLayer(self._passes, self._layer, args, {**self._taps, **taps})

    def copying_to(self, tap: Tap) -> FusedLayer | None:
        if self._taps:
            return None
        return FusedLayer(self._passes, self._layer, [*self._args], {0: tap})

    def _tap_args(self, hidden_states: Tensor) -> ctypes.Array[Struct]:
        args = (TapArgs * len(self._args))()
        for place, tap in self._taps.items():
            rows = tap(hidden_states)  # which the tap keeps alive
            args[place] = TapArgs(rows.data_ptr(), rows.stride(0))
        return args

    def _through_experts(self, pass_args: ctypes.Array[Struct], hidden_states: Tensor) -> Tensor:
        passes, layer = self._passes, self._layer
        mlp_input = hidden_states if layer.mlp_norm is None else torch.empty_like(hidden_states)
        self._library.baton_layer_attention(
            self._args, pass_args, hidden_states.data_ptr(), mlp_input.data_ptr()
        )
        output = compute_output(passes.config, passes.ops, layer, mlp_input)
        return passes.ops.add(hidden_states, output, passes.config.residual_scale)

    def _pass_args(self, forward_pass: ForwardPass) -> ctypes.Array[Struct]:
        return forward_pass.once(self._passes.begin).args


def _layer_args(config: ModelConfig, index: int, layer: Layer, place: LayerPlace) -> Struct:
    own, mlp = config.layers[index], layer.mlp if isinstance(layer.mlp, Mlp) else None
    inputs = None if mlp is None else layer.per_layer
    return LayerArgs(
        input_norm=norm_params(layer.input_norm),
        q_norm=norm_params(layer.q_norm),
        k_norm=norm_params(layer.k_norm),
        v_norm=norm_params(layer.v_norm),
        attention_norm=norm_params(layer.attention_norm),
        mlp_norm=norm_params(layer.mlp_norm),
        mlp_output_norm=norm_params(layer.mlp_output_norm),
        qkv=native_matrix(layer.qkv),
        output=native_matrix(own_part(layer.output)),
        gate_up=native_matrix(mlp.gate_up) if mlp else PackedMatrix(),
        down=native_matrix(own_part(mlp.down)) if mlp else PackedMatrix(),
        own_input_norm=norm_params(inputs.norm if inputs else None),
        own_input_gate=native_matrix(inputs.gate) if inputs else PackedMatrix(),
        own_input_projection=native_matrix(inputs.projection) if inputs else PackedMatrix(),
        own_input=index,
        output_scale=layer.scale,
        writes_kv=own.kv_layer is None,
        values_are_keys=not own.has_value_projection,
        index=place.place,
        kv_group=place.group,
        num_heads=config.num_heads,
        query_rope=own.query_rope,
        key_rope=own.key_rope,
        first_place=first_place(index),
        gate=gate_params(gate_of(config)),
        residual_scale=config.residual_scale,
        norms_all_heads=own.qk_norm is QkNorm.ALL_HEADS,
        norms_rotated=own.qk_norm is QkNorm.ROTATED,
    )
