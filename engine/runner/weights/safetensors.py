"""Reads tensors from safetensors files by name. Every error names the file or the tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model_folder import JsonFields
from errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
WHOLE = ("I8", "I32", "I64")
# Rows of each tensor that the fingerprint reads.
SAMPLED_ROWS = 4

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """Shape and allowed dtypes of a tensor."""

    shape: Shape
    dtypes: tuple[str, ...]


class TensorSlice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice | tuple[slice, ...]) -> Tensor: ...


class TensorFile(Protocol):
    """One open safetensors file. The library's own stubs lack the types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> TensorSlice: ...

    def get_tensor(self, name: str) -> Tensor: ...


class WeightFiles:
    """Open weight files of one folder. Tensors are memory-mapped and read when they are copied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_by_tensor: dict[str, TensorFile] = {}
        self._path_by_tensor: dict[str, Path] = {}

    def __enter__(self) -> WeightFiles:
        try:
            for path in self._paths():
                self._open(path)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file_by_tensor.clear()
        self._stack.close()

    def names(self) -> list[str]:
        return sorted(self._file_by_tensor)

    def shapes(self) -> dict[str, Shape]:
        files = self._file_by_tensor
        return {name: tuple(files[name].get_slice(name).get_shape()) for name in sorted(files)}

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        """Raise ModelError unless the files hold exactly the expected tensors.

        Shape and dtype must match. Ignored tensors can be present or absent.
        """
        found = set(self._file_by_tensor)
        _refuse("lacks", sorted(set(expected) - found), self._folder)
        unknown = sorted(name for name in found - set(expected) if not is_ignored(name))
        _refuse("has tensors that this architecture does not use:", unknown, self._folder)
        for name, tensor in expected.items():
            self._check_one(name, tensor)

    def tensor(self, name: str) -> Tensor:
        return self._file_by_tensor[name].get_tensor(name)

    def part(self, name: str, index: int) -> Tensor:
        """Return one element of a tensor's first dimension. Reads nothing else."""
        return self._file_by_tensor[name].get_slice(name)[index : index + 1][0]

    def copy_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self.tensor(name))

    def digest(self) -> str:
        """Hash names, shapes and dtypes of all tensors, and the bytes of a few rows of each.

        Reads kilobytes per tensor instead of everything. So it detects another model or another
        training run quickly, but not a change confined to rows that it skips.
        """
        digest = hashlib.sha256()
        for name in self.names():
            part = self._file_by_tensor[name].get_slice(name)
            shape = part.get_shape()
            digest.update(f"{name} {part.get_dtype()} {shape}\n".encode())
            for sample in _samples(shape):
                digest.update(_bytes_of(part[sample]))
        return digest.hexdigest()

    def _paths(self) -> list[Path]:
        if (self._folder / INDEX).exists():
            return self._list_shards()
        if (self._folder / SINGLE).exists():
            return [self._folder / SINGLE]
        raise ModelError(
            f"{self._folder} has neither {SINGLE} nor {INDEX}; "
            "weights in other formats must be saved as safetensors first"
        )

    def _list_shards(self) -> list[Path]:
        fields = JsonFields.read(self._folder / INDEX)
        weight_map = fields.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise fields.wrong("weight_map", "must map each tensor to its file")
        paths = [self._folder / str(file) for file in sorted({str(f) for f in weight_map.values()})]
        missing = [path.name for path in paths if not path.exists()]
        _refuse("lacks the weight file", missing, self._folder)
        return paths

    def _open(self, path: Path) -> None:
        try:
            opened: TensorFile = self._stack.enter_context(safe_open(path, framework="pt"))
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is corrupt or cut short ({error}); fetch it again") from error
        for name in names:
            self._file_by_tensor[name] = opened
            self._path_by_tensor[name] = path

    def _check_one(self, name: str, expected: Expected) -> None:
        part = self._file_by_tensor[name].get_slice(name)
        found = tuple(part.get_shape())
        where = f"{self._path_by_tensor[name]}: {name}"
        if found != expected.shape:
            raise ModelError(
                f"{where} has the shape {found}; config.json requires {expected.shape}"
            )
        if part.get_dtype() not in expected.dtypes:
            allowed = list(expected.dtypes)
            raise ModelError(f"{where} is {part.get_dtype()}; it must be one of {allowed}")


def _refuse(fault: str, names: list[str], folder: Path) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        shown = ", ".join(names[:3])
        raise ModelError(f"{folder} {fault} {shown}{more}; it does not match its config.json")


def _samples(shape: list[int]) -> Iterator[tuple[slice, ...]]:
    """Yield a few rows of a tensor. Of stacked matrices, a few rows of a few of them."""
    sampled = [_sampled_rows(size) for size in shape[: max(1, len(shape) - 1)]]
    for rows in product(*sampled) if shape else ():
        yield tuple(slice(row, row + 1) for row in rows)


def _sampled_rows(num_rows: int) -> list[int]:
    if num_rows <= SAMPLED_ROWS:
        return list(range(num_rows))
    return [i * (num_rows - 1) // (SAMPLED_ROWS - 1) for i in range(SAMPLED_ROWS)]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
