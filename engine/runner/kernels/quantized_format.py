"""Format in which the native kernels keep a quantized matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.checkpoint.quantized import STEP_COLUMNS, Quantized

ROUNDED_BITS = 8  # of activations
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_ACTIVATION_BLOCK = 32  # columns with a common scale, if activations have 8 bits
_MAX_GROUP = 256  # with 16-bit scales: sums of a group are 32-bit integers


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
