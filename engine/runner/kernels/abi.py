"""ABI of the kernel library: its structs and functions, as `src/abi.h` declares them.

The file name of a library has a digest of its sources: any library that is found fits the header.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from baton.engine.runner.kernels.build import SOURCES

Struct = ctypes.Structure

_NUMBERS: dict[str, type] = {
    "float": ctypes.c_float,
    "std::int32_t": ctypes.c_int32,
    "std::uint32_t": ctypes.c_uint32,
    "std::int64_t": ctypes.c_int64,
}
_COMMENT = re.compile(r"//.*")
_METHOD = re.compile(r"[^;{}]*\) const \{[^{}]*\}")
_ENUM = re.compile(r"enum class (\w+) : ([\w:]+)")
_STRUCT = re.compile(r"struct (\w+) \{([^{}]*)\};")
_FUNCTION = re.compile(r"^([\w:]+) (baton_\w+)\(([^)]*)\);", re.MULTILINE)
# A type, and the names that have it, each with a * if it is a pointer.
_DECLARATION = re.compile(r"\s*(?:const )?(?:baton::)?([\w:]+)([^;,]+(?:,[^;,]+)*)")


def _read_header() -> tuple[dict[str, type[Struct]], dict[str, tuple[type | None, list[Any]]]]:
    """Return the structs, whose pointers are addresses, and the types of the functions."""
    text = _COMMENT.sub("", (SOURCES / "abi.h").read_text(encoding="utf-8"))
    text = _METHOD.sub("", text)
    types = _NUMBERS | {name: _NUMBERS[kind] for name, kind in _ENUM.findall(text)}
    structs: dict[str, type[Struct]] = {}
    for struct, body in _STRUCT.findall(text):
        fields = [
            (name.strip("* "), ctypes.c_void_p if "*" in name else types[kind])
            for kind, names in _DECLARATION.findall(body)
            for name in names.split(",")
        ]
        structs[struct] = type(struct, (Struct,), {"__slots__": (), "_fields_": fields})
        types[struct] = structs[struct]
    functions: dict[str, tuple[type | None, list[Any]]] = {}
    for result, function, parameters in _FUNCTION.findall(text):
        arguments: list[Any] = []
        for parameter in filter(None, parameters.split(",")):
            [(kind, name)] = _DECLARATION.findall(parameter)
            pointer = ctypes.POINTER(structs[kind]) if kind in structs else ctypes.c_void_p
            arguments.append(pointer if "*" in name else types[kind])
        functions[function] = types.get(result), arguments
    return structs, functions


STRUCTS, FUNCTIONS = _read_header()

PagedKv = STRUCTS["PagedKv"]
BatchLayout = STRUCTS["BatchLayout"]
PackedMatrix = STRUCTS["PackedMatrix"]
NormParams = STRUCTS["NormParams"]
RopeAngles = STRUCTS["RopeAngles"]
GateParams = STRUCTS["GateParams"]
AttentionParams = STRUCTS["AttentionParams"]
LayerArgs = STRUCTS["LayerArgs"]
PassArgs = STRUCTS["PassArgs"]
TapArgs = STRUCTS["TapArgs"]
StateRows = STRUCTS["StateRows"]
StateRuns = STRUCTS["StateRuns"]
CopyArgs = STRUCTS["CopyArgs"]
LowRankPart = STRUCTS["LowRankPart"]
LowRankPlace = STRUCTS["LowRankPlace"]
LowRankAdapter = STRUCTS["LowRankAdapter"]
LowRankGroups = STRUCTS["LowRankGroups"]
PackedF32 = STRUCTS["PackedF32"]
LayerNormF32 = STRUCTS["LayerNormF32"]
RankLinks = STRUCTS["RankLinks"]


def load_library(path: Path) -> ctypes.CDLL:
    """Load a kernel library with typed functions."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
