"""Tensors of GGUF files, under their names of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from baton.checkpoint.checkpoint import Expected, Shape
from baton.checkpoint.gguf.blocks import decode_blocks
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.hub_tensors import HubTensor, Source
from baton.checkpoint.quantized import Quantized, in_one_format, stacked
from baton.checkpoint.weight_digests import DigestCache, FileIdentity, user_digest_cache
from baton.core.errors import ModelError

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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
