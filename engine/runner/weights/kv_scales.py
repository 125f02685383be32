"""Scales of FP8 keys and values in a checkpoint, under the names that vLLM reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Checkpoint, Tensors
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.model.config import ModelConfig

# compressed-tensors, ModelOpt, Quark. `kv_scale` is that of both. Towers have none of use here.
SCALE_NAME = re.compile(
    r"(?!.*vis(?:ion|ual)).*\blayers\.(\d+)\.(?:.*\.)?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)"
)
MODELOPT_FILE = "hf_quant_config.json"


def check_kv_scheme(checkpoint: Checkpoint) -> None:
    """Raise ModelError if the checkpoint's scales are those of another format than FP8."""
    config = checkpoint.read_config()
    if config.has("quantization_config"):
        fields = config.inner("quantization_config")
        if fields.has("kv_cache_scheme"):
            scheme = fields.inner("kv_cache_scheme")
            if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
                raise scheme.wrong("num_bits", "must be 8, of type float, for FP8 KV")
    path = checkpoint.path / MODELOPT_FILE
    if path.exists():
        fields = JsonFields.read(path).inner("quantization")
        if fields.get("kv_cache_quant_algo") not in (None, "FP8"):
            raise fields.wrong("kv_cache_quant_algo", "must be FP8 for FP8 KV")


def with_kv_scales(
    attention: Sequence[LayerAttention], model: ModelConfig, files: Tensors
) -> list[LayerAttention]:
    """Return the attention of the model's layers with the scales that the checkpoint has."""
    names: dict[tuple[int, str], str] = {}
    for name in files.names():
        found = SCALE_NAME.fullmatch(name)
        if found is not None:
            names[int(found[1]), found[2] or found[3]] = name
    scaled = []
    for index, layer in zip(model.attention_layers, attention, strict=True):
        writer = model.layers[index].kv_layer
        own = model.layers[index if writer is None else writer]
        number = own.block if own.block is not None else index if writer is None else writer
        num_heads = model.num_kv_heads if layer.kv_heads is None else layer.kv_heads.num
        scales = _read_scales(files, names, number, num_heads)
        if scales is not None:
            scales = scales[: model.num_kv_tensors]
        scaled.append(replace(layer, kv_scales=scales))
    return scaled


def _read_scales(
    files: Tensors, names: Mapping[tuple[int, str], str], number: int, num_heads: int
) -> Tensor | None:
    """Return [2, kv_heads]; None if the layer has none. If one is missing, it is the other."""
    own = [names.get((number, kind)) or names.get((number, "kv")) for kind in ("k", "v")]
    present = [name or other for name, other in zip(own, reversed(own), strict=True)]
    if None in present:
        return None
    return torch.stack([_read_scale(files, name, num_heads) for name in present if name])


def _read_scale(files: Tensors, name: str, num_heads: int) -> Tensor:
    scale = files.tensor(name).float().flatten()
    if len(scale) not in (1, num_heads) or not ((scale > 0) & scale.isfinite()).all():
        raise ModelError(
            f"{name}: FP8 KV needs one number above 0, or one for each of {num_heads} KV heads"
        )
    return scale.expand(num_heads)
