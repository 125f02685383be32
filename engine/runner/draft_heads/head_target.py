"""Dtype and quantization of a draft head's weights."""

from __future__ import annotations

from dataclasses import replace

from baton.checkpoint.checkpoint import Tensors
from baton.engine.runner.weights.packing_key import are_quantized
from baton.engine.runner.weights.tensor_loading import LoadTarget


def quantized_with(model_files: Tensors, target: LoadTarget) -> LoadTarget:
    """Return the target for a head: 8 bits on CPUs if the model itself has few, or its own dtype.

    Weights in bfloat16 would take much of a draft's time beside such a model. 4 bits cost drafts.
    """
    has_few = target.quantize != "none" or are_quantized(model_files.identities(), model_files)
    quantize = "int8" if has_few and target.parts.packer is not None else "none"
    return replace(target, quantize=quantize, cached=None, importance={})
