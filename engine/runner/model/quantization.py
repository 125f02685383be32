"""Quantization of a checkpoint, read from its config.json. Values only; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.checkpoint.json_fields import JsonFields

GPTQ_FORMATS = ("gptq", "gptq_v2")
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")


class Packing(Enum):
    """Format of the stored numbers."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "compressed-tensors, several numbers in a word"
    BYTES = "compressed-tensors, a byte each"
    FLOAT8 = "compressed-tensors, FP8"
    FP8 = "fp8"
    MXFP4 = "mxfp4"


@dataclass(frozen=True, slots=True)
class Quantization:
    packing: Packing
    bits: int
    group: int | None = None  # group size in columns; None means all of them
    counts_zeros_from_one: bool = False  # stored zero points are one less than the real ones
    # Rows and columns of FP8 with a common scale, None for the whole matrix. 0 columns mean all.
    block: tuple[int, int] | None = None

    @property
    def is_float8(self) -> bool:
        """Return whether matrices are FP8. They are dequantized when they are loaded."""
        return self.packing in (Packing.FP8, Packing.FLOAT8)


def read_quantization(raw: JsonFields) -> Quantization | None:
    """Return None for unquantized weights. Raises ModelError for an unsupported format."""
    if not raw.has("quantization_config"):
        return None
    fields = raw.inner("quantization_config")
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _parse_compressed_tensors,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
    }
    reader = readers.get(str(fields.get("quant_method")))
    if reader is None:
        raise fields.wrong("quant_method", f"must be one of {', '.join(readers)}")
    return reader(fields)


def _gptq(fields: JsonFields) -> Quantization:
    overrides = fields.get("dynamic") or {}
    if not isinstance(overrides, dict) or any(not name.startswith("-:") for name in overrides):
        raise fields.wrong("dynamic", "must only exclude modules, with -: before their names")
    checkpoint_format = fields.get("checkpoint_format") or "gptq"
    if checkpoint_format not in GPTQ_FORMATS:
        raise fields.wrong("checkpoint_format", f"must be one of {', '.join(GPTQ_FORMATS)}")
    bits = _bits(fields, "bits", (4, 8))
    return Quantization(Packing.GPTQ, bits, _group(fields), checkpoint_format == "gptq")


def _awq(fields: JsonFields) -> Quantization:
    if (fields.get("version") or "gemm") not in ("gemm", "GEMM"):
        raise fields.wrong("version", "must be gemm")
    return Quantization(Packing.AWQ, _bits(fields, "bits", (4,)), _group(fields))


def _fp8(fields: JsonFields) -> Quantization:
    if not fields.has("weight_block_size"):
        return Quantization(Packing.FP8, 8)
    return Quantization(Packing.FP8, 8, block=_block(fields, "weight_block_size"))


def _mxfp4(_: JsonFields) -> Quantization:
    return Quantization(Packing.MXFP4, 4, 32)


def _parse_compressed_tensors(fields: JsonFields) -> Quantization:
    format_name = fields.get("format")
    if format_name not in COMPRESSED_FORMATS:
        raise fields.wrong("format", f"must be one of {', '.join(COMPRESSED_FORMATS)}")
    weights = _weights_of_groups(fields)
    expected_type = "float" if format_name == "float-quantized" else "int"
    if weights.get("type") != expected_type:
        raise weights.wrong("type", f"must be {expected_type}")
    if format_name == "float-quantized":
        return _parse_float8(weights)
    if weights.get("strategy") not in ("channel", "group"):
        raise weights.wrong("strategy", "must be channel or group")
    group = _group(weights) if weights.get("strategy") == "group" else None
    if format_name == "pack-quantized":
        return Quantization(Packing.PACKED, _bits(weights, "num_bits", (4, 8)), group)
    return Quantization(Packing.BYTES, _bits(weights, "num_bits", (8,)), group)


def _weights_of_groups(fields: JsonFields) -> JsonFields:
    """Return the description of the weights, which must be the same in all groups of layers."""
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.wrong("config_groups", "must hold a group")
    inner = fields.inner("config_groups")
    first, *others = (inner.inner(name).inner("weights") for name in groups)
    names = ("type", "num_bits", "strategy", "group_size", "block_structure")
    if any(first.get(name) != other.get(name) for other in others for name in names):
        raise fields.wrong("config_groups", "must describe the same weights in each group")
    return first


def _parse_float8(weights: JsonFields) -> Quantization:
    bits = _bits(weights, "num_bits", (8,))
    strategy = weights.get("strategy")
    if strategy == "block":
        return Quantization(Packing.FLOAT8, bits, block=_block(weights, "block_structure"))
    if strategy not in ("channel", "tensor"):
        raise weights.wrong("strategy", "must be channel, tensor or block")
    return Quantization(Packing.FLOAT8, bits, block=(1, 0) if strategy == "channel" else None)


def _block(fields: JsonFields, name: str) -> tuple[int, int]:
    sizes = fields.numbers(name)
    if len(sizes) != 2 or any(size < 1 or size != int(size) for size in sizes):
        raise fields.wrong(name, "must hold two whole numbers above 0")
    return int(sizes[0]), int(sizes[1])


def _bits(fields: JsonFields, name: str, known: tuple[int, ...]) -> int:
    if fields.get(name) not in known:
        raise fields.wrong(name, f"must be {' or '.join(map(str, known))}")
    return fields.positive_int(name)


def _group(fields: JsonFields) -> int | None:
    if fields.number("group_size") == -1:
        return None
    group = fields.positive_int("group_size")
    if group % 8:
        raise fields.wrong("group_size", "must be a multiple of 8, or -1")
    return group
