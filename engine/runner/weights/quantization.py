"""Quantization of a checkpoint, read from its config.json. Values only; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.model_folder import JsonFields

GPTQ_FORMATS = ("gptq", "gptq_v2")
COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


class Packing(Enum):
    """Packing format of the stored integers."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "compressed-tensors, several numbers in a word"
    BYTES = "compressed-tensors, a byte each"


@dataclass(frozen=True, slots=True)
class Quantization:
    packing: Packing
    bits: int
    group: int | None  # group size in columns; None means all of them
    counts_zeros_from_one: bool = False  # stored zero points are one less than the real ones


def read_quantization(raw: JsonFields) -> Quantization | None:
    """Return None for unquantized weights. Raises ModelError for an unsupported format."""
    if not raw.has("quantization_config"):
        return None
    fields = raw.inner("quantization_config")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _parse_compressed_tensors}
    reader = readers.get(str(fields.get("quant_method")))
    if reader is None:
        raise fields.wrong("quant_method", f"must be one of {', '.join(readers)}")
    return reader(fields)


def _gptq(fields: JsonFields) -> Quantization:
    checkpoint_format = fields.get("checkpoint_format") or "gptq"
    if checkpoint_format not in GPTQ_FORMATS:
        raise fields.wrong("checkpoint_format", f"must be one of {', '.join(GPTQ_FORMATS)}")
    bits = _bits(fields, "bits", (4, 8))
    return Quantization(Packing.GPTQ, bits, _group(fields), checkpoint_format == "gptq")


def _awq(fields: JsonFields) -> Quantization:
    if (fields.get("version") or "gemm") not in ("gemm", "GEMM"):
        raise fields.wrong("version", "must be gemm")
    return Quantization(Packing.AWQ, _bits(fields, "bits", (4,)), _group(fields))


def _parse_compressed_tensors(fields: JsonFields) -> Quantization:
    format_name = fields.get("format")
    if format_name not in COMPRESSED_FORMATS:
        raise fields.wrong("format", f"must be one of {', '.join(COMPRESSED_FORMATS)}")
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise fields.wrong("config_groups", "must hold one group")
    weights = fields.inner("config_groups").inner(next(iter(groups))).inner("weights")
    if weights.get("type") != "int":
        raise weights.wrong("type", "must be int")
    if weights.get("strategy") not in ("channel", "group"):
        raise weights.wrong("strategy", "must be channel or group")
    group = _group(weights) if weights.get("strategy") == "group" else None
    if format_name == "pack-quantized":
        return Quantization(Packing.PACKED, _bits(weights, "num_bits", (4, 8)), group)
    return Quantization(Packing.BYTES, _bits(weights, "num_bits", (8,)), group)


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
