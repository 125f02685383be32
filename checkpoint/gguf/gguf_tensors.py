"""Tensors of GGUF files, under their names of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from baton.checkpoint.checkpoint import Expected, Shape
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.header import BlockType
from baton.checkpoint.gguf.hub_tensors import HubTensor, Source
from baton.checkpoint.quantized import Quantized, in_one_format, stacked
from baton.checkpoint.weight_digests import DigestCache, FileIdentity, user_digest_cache
from baton.core.errors import ModelError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SMALLEST_SCALE = 0x00400000  # bits of 2^-127


class GgufTensors:
    """Implements `Tensors`. The files are memory-mapped, and read tensor by tensor."""

    def __init__(
        self,
        file: GgufFile,
        tensors: Mapping[str, HubTensor],
        digests: DigestCache | None = None,
    ) -> None:
        self._file = file
        self._tensors = tensors
        self._digests = user_digest_cache() if digests is None else digests
        self._stack = ExitStack()
        self._bytes: dict[Path, Tensor] = {}
        self._identities: dict[Path, FileIdentity] = {}

    def __enter__(self) -> GgufTensors:
        try:
            for path in self._file.paths:
                self._identities[path] = FileIdentity.of(path)
                opened = self._stack.enter_context(path.open("rb"))
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
                self._bytes[path] = torch.frombuffer(mapped, dtype=torch.uint8)
        except (OSError, ValueError) as error:
            self._stack.close()
            raise ModelError(f"{self._file.path} cannot be read: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._bytes.clear()
        self._stack.close()

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def shapes(self) -> dict[str, Shape]:
        return {name: self._tensors[name].shape for name in self.names()}

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        found = set(self._tensors)
        self._refuse("lacks", set(expected) - found)
        unused = {name for name in found - set(expected) if not is_ignored(name)}
        self._refuse("has tensors that this architecture does not use:", unused)
        for name, tensor in expected.items():
            shape = self._tensors[name].shape
            if shape != tensor.shape:
                raise ModelError(
                    f"{self._file.path}: {self._tensors[name].sources[0].entry.name} has the shape "
                    f"{shape}; the metadata requires {tensor.shape}"
                )

    def tensor(self, name: str) -> Tensor:
        return self._join(self._tensors[name])

    def part(self, name: str, index: int) -> Tensor:
        return self._join(self._tensors[name].element(index))

    def copy_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self.tensor(name))

    def quantized(self, name: str, index: int | None = None) -> Sequence[Quantized] | None:
        tensor = self._tensors[name]
        tensor = tensor if index is None else tensor.element(index)
        if tensor.change.is_of_numbers:
            return None
        if any(each.entry.type.is_plain or each.is_transposed for each in tensor.sources):
            return None
        parts = [self._decode(source) for source in tensor.sources]
        rows, columns = tensor.row_order(), tensor.column_order()
        if rows is not None:
            parts = [stacked(in_one_format(parts)).rows(torch.tensor(rows))]
        if columns is None:
            return parts
        moved = [part.columns(torch.tensor(columns)) for part in parts]
        return None if None in moved else [part for part in moved if part is not None]

    def identities(self) -> list[FileIdentity]:
        return list(self._identities.values())

    def digest(self) -> str:
        """Hash names, shapes, types and bytes. Raises ModelError if a file has changed."""
        digest = hashlib.sha256()
        by_name: dict[str, str] = {}
        for path, identity in self._identities.items():
            names = [name for name, found in self._file.path_of.items() if found == path]
            known = self._digests.find(identity, names)
            digests = known or {name: self._digest_of(name) for name in names}
            by_name |= digests
            if FileIdentity.of(path) != identity:
                raise ModelError(f"{path} changed while it was loaded; start again")
            if not known:
                self._digests.keep(identity, digests)
        for name in sorted(by_name):
            entry = self._file.tensors[name]
            digest.update(json.dumps([name, entry.type.name, entry.shape, by_name[name]]).encode())
        return digest.hexdigest()

    def _digest_of(self, name: str) -> str:
        return xxh3_128_hexdigest(self._raw(Source(self._file.tensors[name])).numpy().data)

    def _join(self, tensor: HubTensor) -> Tensor:
        parts = [self._plain(source) for source in tensor.sources]
        change, dimension = tensor.change, -2 if parts[0].ndim > 1 else 0
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dimension)
        rows, columns = tensor.row_order(), tensor.column_order()
        whole = whole if rows is None else whole[torch.tensor(rows)]
        whole = whole if columns is None else whole[..., torch.tensor(columns)]
        whole = whole.transpose(0, 1) if change.swaps_dimensions else whole
        whole = whole.reshape(tensor.shape)
        if change.is_rate:
            return (-whole).log()
        return whole - change.offset if change.offset else whole

    def _plain(self, source: Source) -> Tensor:
        """Return a tensor of numbers, dequantized if necessary."""
        kind = source.entry.type
        shape = source.shape[::-1] if source.is_transposed else source.shape
        if kind.is_plain:
            numbers = self._raw(source).view(PLAIN[kind.name])
        else:
            numbers = self._decode(source).dequantize()
        numbers = numbers.reshape(shape)
        return numbers.T if source.is_transposed else numbers

    def _decode(self, source: Source) -> Quantized:
        num_columns, kind = source.entry.shape[-1], source.entry.type
        row_bytes = num_columns // kind.numbers * kind.num_bytes
        return decode_blocks(kind, self._raw(source).reshape(-1, row_bytes))

    def _raw(self, source: Source) -> Tensor:
        """Return the bytes of a source, mapped."""
        entry, path = source.entry, self._file.path_of[source.entry.name]
        first, size = entry.offset, entry.num_bytes
        if source.part is not None:
            size //= entry.shape[0]
            first += source.part * size
        if source.rows is not None:
            row_size = size // entry.shape[0]
            first += source.rows.start * row_size
            size = len(source.rows) * row_size
        return self._bytes[path][first : first + size]

    def _refuse(self, fault: str, names: set[str]) -> None:
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            shown = ", ".join(sorted(names)[:3])
            raise ModelError(
                f"{self._file.path} {fault} {shown}{more}; it does not match its metadata"
            )


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Numbers [blocks, numbers of a block] as uint8; scales and offsets [blocks, groups]."""

    numbers: Tensor
    scales: Tensor
    zero: int = 0  # if there are no offsets
    offsets: Tensor | None = None
    is_mxfp4: bool = False
    scale_steps: Tensor | None = None  # [blocks, 1]
    offset_steps: Tensor | None = None


def decode_blocks(kind: BlockType, rows: Tensor) -> Quantized:
    """Return the matrix of which `rows` are the bytes, [rows, bytes], for float32 activations.

    Dequantized in float32, they give the same bits as ggml. Each decoder takes the blocks of a
    matrix as bytes, [blocks, bytes], and returns numbers, scales, and either zero points or
    offsets.
    """
    bits, decode = DECODERS[kind.name]
    num_rows = len(rows)
    decoded = decode(rows.reshape(-1, kind.num_bytes))
    by_row = {
        name: None if tensor is None else tensor.reshape(num_rows, -1)
        for name in ("offsets", "scale_steps", "offset_steps")
        for tensor in [getattr(decoded, name)]
    }
    numbers = decoded.numbers.reshape(num_rows, -1)
    scales = decoded.scales.reshape(num_rows, -1)
    has_zeros = decoded.offsets is None and not decoded.is_mxfp4
    return Quantized(
        numbers,
        scales,
        torch.full(scales.shape if has_zeros else (num_rows, 0), decoded.zero, dtype=torch.uint8),
        bits,
        numbers.shape[1] // scales.shape[1],
        torch.float32,
        is_mxfp4=decoded.is_mxfp4,
        **by_row,
    )


def _q4_0(blocks: Tensor) -> _Decoded:
    return _Decoded(_halves(blocks[:, 2:]), _float16(blocks[:, :2]), 8)


def _q4_1(blocks: Tensor) -> _Decoded:
    scales, offsets = _float16(blocks[:, :2]), _float16(blocks[:, 2:4])
    return _Decoded(_halves(blocks[:, 4:]), scales, offsets=offsets)


def _q5_0(blocks: Tensor) -> _Decoded:
    numbers = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Decoded(numbers + 16, _float16(blocks[:, :2]), 32)  # in the middle of six bits


def _q5_1(blocks: Tensor) -> _Decoded:
    numbers = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Decoded(numbers, _float16(blocks[:, :2]), offsets=_float16(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> _Decoded:
    return _Decoded(blocks[:, 2:] ^ 128, _float16(blocks[:, :2]), 128)  # from int8


def _iq4_nl(blocks: Tensor) -> _Decoded:
    values = torch.tensor(IQ4_NL_VALUES, dtype=torch.int16).add(128).to(torch.uint8)
    return _Decoded(values[_halves(blocks[:, 2:]).int()], _float16(blocks[:, :2]), 128)


def _mxfp4(blocks: Tensor) -> _Decoded:
    scales = (blocks[:, :1].int() << 23).clamp_min(SMALLEST_SCALE).view(torch.float32)
    return _Decoded(_halves(blocks[:, 1:]), scales, is_mxfp4=True)


def _q4_k(blocks: Tensor) -> _Decoded:
    return _with_scales_of_eight(_halves_by_group(blocks[:, 16:]), blocks)


def _q5_k(blocks: Tensor) -> _Decoded:
    high = [blocks[:, 16:48] >> group & 1 for group in range(8)]
    numbers = _halves_by_group(blocks[:, 48:]) | torch.cat(high, dim=1) << 4
    return _with_scales_of_eight(numbers, blocks)


def _q6_k(blocks: Tensor) -> _Decoded:
    """Decode six bits: four of `low`, two of `high`, for two halves of 128 numbers each."""
    low, high = blocks[:, :128].unflatten(1, (2, 64)), blocks[:, 128:192].unflatten(1, (2, 32))
    numbers = torch.cat((low & 15, low >> 4), dim=2)
    numbers |= torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], dim=2)
    steps = _float16(blocks[:, 208:])
    scales = steps.float() * blocks[:, 192:208].view(torch.int8).float()
    return _Decoded(numbers.flatten(1), scales, 32, scale_steps=steps)


DECODERS: Mapping[str, tuple[int, Callable[[Tensor], _Decoded]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (6, _q5_0),
    "Q5_1": (6, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q5_K": (6, _q5_k),
    "Q6_K": (6, _q6_k),
    "IQ4_NL": (8, _iq4_nl),
    "MXFP4": (4, _mxfp4),
}


def _float16(numbers: Tensor) -> Tensor:
    """Return the float16 numbers in these bytes."""
    return numbers.contiguous().view(torch.float16)


def _halves(numbers: Tensor) -> Tensor:
    """[…, bytes] → […, 2 * bytes]: the lower halves, then the upper ones."""
    both = torch.empty(*numbers.shape[:-1], 2 * numbers.shape[-1], dtype=torch.uint8)
    lower, upper = both.chunk(2, dim=-1)
    torch.bitwise_and(numbers, 15, out=lower)
    torch.bitwise_right_shift(numbers, 4, out=upper)
    return both


def _halves_by_group(numbers: Tensor) -> Tensor:
    """Split each 32 bytes into their lower halves, then their upper ones."""
    return _halves(numbers.unflatten(1, (-1, 32))).flatten(1)


def _fifth_bits(words: Tensor) -> Tensor:
    """[blocks, 4] → [blocks, 32]: each bit as the fifth of a number."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (words[:, :, None] >> bits & 1).flatten(1) << 4


def _with_scales_of_eight(numbers: Tensor, blocks: Tensor) -> _Decoded:
    """Return numbers with scales and offsets of eight groups, each stored in six bits."""
    low, middle, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, mixed & 15 | low >> 2 & 48), dim=1)
    offsets = torch.cat((middle & 63, mixed >> 4 | middle >> 2 & 48), dim=1)
    steps, offset_steps = _float16(blocks[:, :2]), -_float16(blocks[:, 2:4])
    return _Decoded(
        numbers,
        steps.float() * scales.float(),
        offsets=offset_steps.float() * offsets.float(),
        scale_steps=steps,
        offset_steps=offset_steps,
    )
