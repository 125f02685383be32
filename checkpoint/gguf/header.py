"""Reads the header of a GGUF file: its metadata and its table of tensors. No torch.

The file is not trusted: every count and offset is checked against the bytes that are there, before
anything of that size is built.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from baton.checkpoint.json_fields import shorten
from baton.core.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# No model comes near these limits. They bound time and memory for a file that lies.
MAX_FIELDS = 4096
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1024
MAX_TEXTS = 1 << 21  # in all lists of texts: tokens and merges
MAX_TEXT_BYTES = 64 << 20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

STRING, ARRAY = 8, 9
NUMBERS: Mapping[int, np.dtype] = MappingProxyType(
    {
        code: np.dtype(name)
        for code, name in {
            0: "u1",
            1: "i1",
            2: "<u2",
            3: "<i2",
            4: "<u4",
            5: "<i4",
            6: "<f4",
            7: "?",
            10: "<u8",
            11: "<i8",
            12: "<f8",
        }.items()
    }
)

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of a tensor in its file."""

    name: str
    shape: tuple[int, ...]  # rows first, as torch has it: the reverse of the file's order
    type: BlockType
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of a file's header."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorEntry]


def read_header(path: Path) -> Header:
    """Read and check a header. Raises ModelError, which names the file and what is wrong."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < len(MAGIC) + 20:
                raise ModelError(f"{path} is too short for a GGUF file; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return _HeaderReader(path, mapped).read()
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error


class _HeaderReader:
    """Reads from the start of a file on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._num_texts = 0

    def read(self) -> Header:
        if self._take(4, "the magic number") != MAGIC:
            raise self._error("does not begin with GGUF")
        version = self._integer("<I")
        if version not in VERSIONS:
            if version in [int.from_bytes(v.to_bytes(4, "big"), "little") for v in VERSIONS]:
                raise self._error("is big-endian, which is not supported", fetch=False)
            known = " or ".join(map(str, VERSIONS))
            raise self._error(
                f"has version {version}, not {known}; convert the model again", fetch=False
            )
        num_tensors = self._count("<Q", MAX_TENSORS, "tensors")
        num_fields = self._count("<Q", MAX_FIELDS, "metadata fields")
        metadata = self._read_metadata(num_fields)
        tensors = self._read_tensors(num_tensors, self._alignment(metadata))
        return Header(self._path, metadata, tensors)

    def _read_metadata(self, count: int) -> dict[str, Value]:
        metadata: dict[str, Value] = {}
        for _ in range(count):
            name = self._text("a metadata field's name", MAX_NAME_BYTES)
            if name in metadata:
                raise self._error(f"has the metadata field {name!r} twice")
            metadata[name] = self._value(self._integer("<I"), name)
        return metadata

    def _value(self, code: int, name: str) -> Value:
        if code == STRING:
            return self._text(name, MAX_TEXT_BYTES)
        if code == ARRAY:
            return self._array(name)
        return self._numbers(code, 1, name)[0]

    def _array(self, name: str) -> Value:
        code, count = self._integer("<I"), self._integer("<Q")
        if code != STRING:
            return self._numbers(code, count, name)
        self._num_texts += count
        if self._num_texts > MAX_TEXTS:
            raise self._error(f"has {count} texts in {name!r}; at most {MAX_TEXTS} are supported")
        return self._texts(count, name)

    def _texts(self, count: int, name: str) -> list[str]:
        """Read a list of texts, such as a vocabulary. It is as fast as Python can be."""
        data, at, unpack = self._data, self._at, struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                end = at + 8 + unpack(data, at)[0]
                texts.append(data[at + 8 : end].decode())
                at = end
        except struct.error:
            raise self._error(f"ends within {shorten(name)}") from None
        except UnicodeDecodeError as error:
            raise self._error(f"has bytes in {shorten(name)} that are not UTF-8") from error
        if at > len(data):
            raise self._error(f"ends within {shorten(name)}")
        self._at = at
        return texts

    def _numbers(self, code: int, count: int, name: str) -> list[int]:
        if code not in NUMBERS:
            raise self._error(f"has values of the unknown type {code} in {name!r}")
        kind = NUMBERS[code]
        taken = self._take(count * kind.itemsize, name)
        if kind.kind == "b":
            return [value != 0 for value in taken]
        found: list[int] = np.frombuffer(taken, kind).tolist()
        return found

    def _read_tensors(self, count: int, alignment: int) -> dict[str, TensorEntry]:
        entries = [self._tensor() for _ in range(count)]
        first = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        end, last = first, ""
        for entry in sorted(entries, key=lambda entry: entry.offset):
            placed = TensorEntry(
                entry.name, entry.shape, entry.type, first + entry.offset, entry.num_bytes
            )
            if entry.name in tensors:
                raise self._error(f"has the tensor {entry.name!r} twice")
            if entry.offset % alignment:
                raise self._error(f"has {entry.name!r} at an offset that is not aligned")
            if placed.offset < end:
                raise self._error(f"has {entry.name!r} overlapping {last!r}")
            end, last = placed.offset + placed.num_bytes, entry.name
            tensors[entry.name] = placed
        if tensors and end > len(self._data):
            raise self._error(f"ends within {last!r}: {end - len(self._data)} bytes are missing")
        return tensors

    def _tensor(self) -> TensorEntry:
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        num_dimensions = self._integer("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"has {name!r} with {num_dimensions} dimensions")
        sizes = [self._integer("<Q") for _ in range(num_dimensions)]
        kind = self._type(name)
        offset = self._integer("<Q")
        num_numbers = 1
        for size in sizes:
            num_numbers *= size
        if num_numbers == 0 or sizes[0] % kind.numbers:
            raise self._error(f"has {name!r} of shape {sizes}, which {kind.name} cannot store")
        num_bytes = num_numbers // kind.numbers * kind.num_bytes
        if max(num_bytes, offset) > len(self._data):
            raise self._error(f"has {name!r} of shape {sizes}, which is larger than the file")
        return TensorEntry(name, tuple(reversed(sizes)), kind, offset, num_bytes)

    def _type(self, name: str) -> BlockType:
        code = self._integer("<I")
        if code in BLOCK_TYPES:
            return BLOCK_TYPES[code]
        known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
        found = OTHER_TYPES.get(code, f"of the unknown type {code}")
        raise self._error(f"has {name!r} as {found}; supported are {known}", fetch=False)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        found = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(found) is not int or not 0 < found <= MAX_ALIGNMENT or found & found - 1:
            raise self._error(f"has the alignment {shorten(repr(found))}, not a power of two")
        return found

    def _text(self, what: str, max_bytes: int) -> str:
        size = self._integer("<Q")
        if size > max_bytes:
            raise self._error(f"has a text of {size} bytes as {shorten(what)}")
        try:
            return self._take(size, what).decode()
        except UnicodeDecodeError as error:
            raise self._error(f"has bytes in {shorten(what)} that are not UTF-8") from error

    def _count(self, form: str, limit: int, what: str) -> int:
        count = self._integer(form)
        if count > limit:
            raise self._error(f"claims to have {count} {what}; at most {limit} are supported")
        return count

    def _integer(self, form: str) -> int:
        taken = self._take(struct.calcsize(form), "a number")
        return int(struct.unpack(form, taken)[0])

    def _take(self, size: int, what: str) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._error(f"ends within {shorten(what)}")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _error(self, what: str, *, fetch: bool = True) -> ModelError:
        return ModelError(f"{self._path} {what}{'; fetch it again' if fetch else ''}")


class BlockType(NamedTuple):
    """A type stores numbers in blocks; blocks lie within a row."""

    name: str
    numbers: int  # per block
    num_bytes: int  # per block

    @property
    def is_plain(self) -> bool:
        """Return whether this is a dtype of its own rather than quantized."""
        return self.numbers == 1


# By the number in the file. Others exist; those are refused by number or name.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
# Types that are refused, by the names that users know.
OTHER_TYPES = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}
