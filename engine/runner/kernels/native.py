"""Native kernels for bfloat16 on the CPU: `Ops` and `Linear`."""

from __future__ import annotations

import logging
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from baton.checkpoint.quantized import STEP_COLUMNS, Quantized
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.engine.runner.kernels.abi import LayerNormF32, PackedMatrix, RopeAngles
from baton.engine.runner.kernels.calls import Kernels, gate_params, norm_params
from baton.engine.runner.kernels.native_experts import ExpertMixing, Experts
from baton.engine.runner.kernels.native_linear import (
    FORMAT_FIELDS,
    NativeHeadLinears,
    NativeLinear,
    native_experts,
)
from baton.engine.runner.model.config import Scoring
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import ExpertChoice, Moe, Router
from baton.engine.runner.model.ops import MlpGate, Norm, Ops, Peaks
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.weights.packed_weight import PackedWeight

log = logging.getLogger(__name__)

_SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SOFTMAX_OF_TOP: 1, Scoring.SIGMOID: 2}
LANES = 16  # numbers of a vector
ROUNDED_BITS = 8  # of activations
INTEGER_BITS = 13  # of bfloat16 weights that are multiplied as integers, and of their activations
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_ACTIVATION_BLOCK = 32  # columns with a common scale, if activations have 8 bits
_MAX_GROUP = 256  # with 16-bit scales: sums of a group are 32-bit integers


@cache
def _log_rounding() -> None:
    log.info(
        "weights of 4 to 6 bits multiply activations rounded to 8 bits; --activation-dtype "
        "bfloat16 does not round"
    )


class NativeOps(Ops):
    """Operations with kernels. Implements `Packer`."""

    copies_weights = True
    keeps_quantized = True

    def __init__(
        self, kernels: Kernels, *, int8_activations: bool = False, as_integers: bool = False
    ) -> None:
        """`int8_activations`: weights of 4 and 6 bits multiply activations rounded to 8 bits.

        `as_integers`: bfloat16 is multiplied as integers, by the AVX2 kernels only, and without
        `rows`.
        """
        self.kernels = kernels
        self._int8_activations = int8_activations
        self._plain_bits = INTEGER_BITS if as_integers else 16
        self.experts = ExpertMixing(kernels)
        self._experts: WeakKeyDictionary[Moe, Experts | None] = WeakKeyDictionary()

    @property
    def layout(self) -> str:
        """Return the name of the library, which has a digest of its sources and flags."""
        activations = " int8" if self._int8_activations else ""
        return f"{self.kernels.path.name}{activations}"

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> NativeLinear:
        """Pack a copy of the weight."""
        return self.packed_linear(self.pack(weight), bias)

    def pack(self, weight: Tensor | Quantized) -> PackedWeight:
        """Pack a copy of the weight, on huge pages where available."""
        if isinstance(weight, Quantized):
            fields, tensors = quantized_format(weight, rounds_activations=self._int8_activations)
        else:
            bits = self._plain_bits
            fields, tensors = {"bits": bits, "activation_bits": bits}, {"weights": weight}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        num_rows, num_columns = tensors["weights"].shape
        if not isinstance(weight, Quantized) and num_columns % 2:
            raise ValueError(f"a matrix of {num_columns} columns: the kernels need an even number")
        matrix = PackedMatrix(num_rows=num_rows, num_columns=num_columns, **fields)
        memory = huge_page_memory(self.kernels.library.baton_packed_bytes(matrix))
        packed = torch.frombuffer(memory, dtype=torch.uint8)
        matrix.packed = packed.data_ptr()
        self.kernels.call("baton_pack", matrix=matrix, **tensors)
        described = {name: int(getattr(matrix, name)) for name in FORMAT_FIELDS}
        order = weight.order if isinstance(weight, Quantized) else None
        return PackedWeight(described, packed, order)

    def packed_linear(self, packed: PackedWeight, bias: Tensor | None) -> NativeLinear:
        matrix = PackedMatrix(
            packed=packed.data.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            **packed.fields,
        )
        if matrix.activation_bits == ROUNDED_BITS:
            _log_rounding()
        return NativeLinear(self.kernels, matrix, (packed.data, bias), packed.column_order)

    def head_linears(self, weights: Tensor) -> NativeHeadLinears:
        linears = [self.linear(weight, None) for weight in weights]
        array = PackedMatrix * len(linears)
        return NativeHeadLinears(
            self.kernels, array(*(linear.matrix for linear in linears)), linears
        )

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        if norm.is_centered:
            return self.layer_norm(hidden_states, LayerNorm(norm.weight, None, norm.epsilon))
        num_rows, size = hidden_states.shape
        if hidden_states.stride(1) != 1:
            hidden_states = hidden_states.contiguous()
        output = torch.empty(num_rows, size, dtype=hidden_states.dtype)
        self.kernels.call(
            "baton_rms_norm",
            src=hidden_states,
            norm=norm_params(norm),
            dst=output,
            num_rows=num_rows,
            size=size,
            src_stride=hidden_states.stride(0),
            dst_stride=size,
        )
        return output

    def layer_norm(self, hidden_states: Tensor, norm: LayerNorm) -> Tensor:
        """Layer norm of [tokens, size]. Torch computes rows of broken vectors."""
        hidden_states = hidden_states.contiguous()
        num_rows, size = hidden_states.shape
        if size % LANES:
            return norm(hidden_states)
        output = torch.empty_like(hidden_states)
        bias = None if norm.bias is None else norm.bias.data_ptr()
        self.kernels.call(
            "baton_layer_norm",
            src=hidden_states,
            norm=LayerNormF32(norm.weight.data_ptr(), bias, norm.epsilon),
            dst=output,
            num_rows=num_rows,
            size=size,
        )
        return output

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        num_tokens, num_heads, head_dim = heads.shape
        if heads.stride()[1:] != (head_dim, 1):
            heads = heads.contiguous()
        cosines, sines = (angle.contiguous() for angle in angles)
        output = torch.empty(heads.shape, dtype=heads.dtype)
        self.kernels.call(
            "baton_rope",
            src=heads,
            norm=norm_params(norm),
            angles=RopeAngles(cosines.data_ptr(), sines.data_ptr()),
            dst=output,
            src_stride=heads.stride(0),
            num_tokens=num_tokens,
            num_heads=num_heads,
            head_dim=head_dim,
        )
        return output

    def apply_gate(self, gate_up: Tensor, gate: MlpGate) -> Tensor:
        gate_up = gate_up.contiguous()
        num_tokens, size = gate_up.shape
        if gate.activation.is_gated:
            size //= 2
        output = torch.empty(num_tokens, size, dtype=gate_up.dtype)
        self.kernels.call(
            "baton_gate",
            src=gate_up,
            dst=output,
            num_tokens=num_tokens,
            size=size,
            gate=gate_params(gate),
        )
        return output

    def multiply_sigmoid(self, hidden_states: Tensor, gates: Tensor) -> Tensor:
        hidden_states = hidden_states.contiguous()
        if gates.stride(1) != 1:
            gates = gates.contiguous()
        num_rows, size = hidden_states.shape
        self.kernels.call(
            "baton_multiply_sigmoid",
            dst=hidden_states,
            gates=gates,
            num_rows=num_rows,
            size=size,
            gate_stride=gates.stride(0),
            has_one_gate=gates.shape[1] == 1,
        )
        return hidden_states

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        hidden_states, output = hidden_states.contiguous(), output.contiguous()
        self.kernels.library.baton_add(
            hidden_states.data_ptr(),
            output.data_ptr(),
            hidden_states.numel(),
            scale,
            self.kernels.num_threads,
        )
        return hidden_states

    def route(self, hidden_states: Tensor, router: Router) -> ExpertChoice:
        hidden_states = hidden_states.contiguous()
        config, num_tokens = router.config, len(hidden_states)
        expert_ids = torch.empty(num_tokens, config.top_k, dtype=torch.int64)
        weights = torch.empty(num_tokens, config.top_k)
        self.kernels.call(
            "baton_route",
            router=router.weight,
            bias=router.bias,
            correction_bias=router.correction_bias,
            src=hidden_states,
            expert_ids=expert_ids,
            weights=weights,
            num_tokens=num_tokens,
            hidden_size=hidden_states.shape[1],
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_best=config.group_best,
            scale=config.scale,
            scoring=_SCORINGS[config.scoring],
            normalizes=config.normalizes,
        )
        return ExpertChoice(expert_ids, weights)

    def mix_experts(
        self, moe: Moe, gate: MlpGate, hidden_states: Tensor, routing: ExpertChoice
    ) -> Tensor:
        experts = self.join_experts(moe)
        if experts is None:
            return self.mix_one_by_one(moe, gate, hidden_states, routing)
        return self.experts.mix(experts, moe, gate, hidden_states, routing)

    def join_experts(self, moe: Moe) -> Experts | None:
        """Return None if the kernels cannot compute these experts together."""
        if moe not in self._experts:
            self._experts[moe] = native_experts(moe.experts)
        return self._experts[moe]

    def find_peaks(self, logits: Tensor) -> Peaks:
        logits = logits.contiguous()
        num_rows, size = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        are_finite = torch.empty(num_rows, dtype=torch.bool)
        self.kernels.call(
            "baton_argmax",
            logits=logits,
            indices=token_ids,
            are_finite=are_finite,
            num_rows=num_rows,
            size=size,
        )
        return Peaks(token_ids, are_finite)


def quantized_format(
    weight: Quantized, *, rounds_activations: bool
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return fields of PackedMatrix, and tensors of PackArgs."""
    rounds = rounds_activations and _can_round(weight)
    is_centred = rounds and _is_centred(weight)
    has_steps = rounds and _has_steps(weight)
    tensors = {"weights": weight.numbers, "zeros": weight.zeros}
    tensors |= _stepped_scales(weight) if has_steps else _scales(weight)
    fields = {
        "bits": 8 if weight.bits == 6 and not rounds else weight.bits,
        "group_size": weight.group,
        "is_mxfp4": weight.is_mxfp4,
        "scale_type": _SCALE_TYPES[tensors["scales"].dtype],
        "has_offsets": weight.offsets is not None,
        "is_centred": is_centred,
        "activation_bits": ROUNDED_BITS if rounds else 16,
    }
    return fields, tensors


def _can_round(weight: Quantized) -> bool:
    has_blocks = weight.group % _ACTIVATION_BLOCK == 0 and weight.group <= _MAX_GROUP
    return (has_blocks and weight.bits < 8) or (weight.group == 16 and weight.bits == 6)


def _has_steps(weight: Quantized) -> bool:
    """Return whether the kernels can use scales that are whole multiples of steps."""
    groups = (16,) if weight.offsets is None else (16, 32)
    return weight.scale_steps is not None and weight.group in groups


def _is_centred(weight: Quantized) -> bool:
    """Return whether all zero points are the middle of the numbers."""
    if not weight.zeros.numel():
        return False
    return bool((weight.zeros == 1 << (weight.bits - 1)).all())


def _scales(weight: Quantized) -> dict[str, Tensor]:
    weight = weight.without_steps()
    scales = weight.scales.float() if weight.group > _MAX_GROUP else weight.scales
    if weight.offsets is None:
        return {"scales": scales}
    return {"scales": scales, "offsets": weight.offsets.to(scales.dtype)}


def _stepped_scales(weight: Quantized) -> dict[str, Tensor]:
    found = {}
    pairs = {"scale": weight.scales, "offset": weight.offsets}
    for name, numbers in pairs.items():
        steps = getattr(weight, f"{name}_steps")
        if numbers is not None and steps is not None:
            by_group = steps.float().repeat_interleave(STEP_COLUMNS // weight.group, dim=1)
            whole = numbers.float() / by_group[:, : numbers.shape[1]]
            found[f"{name}s"] = whole.nan_to_num(0, 0, 0).round().to(torch.int8)
            found[f"{name}_steps"] = steps
    return found
