"""Reads tensors from files of a folder by name. Every error names the file or the tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.checkpoint.checkpoint import Expected, Shape
from baton.checkpoint.model_files import INDEX, PICKLED, SINGLE, list_weight_files
from baton.checkpoint.weight_digests import (
    DigestCache,
    FileIdentity,
    digest_of,
    user_digest_cache,
)
from baton.core.errors import ModelError

FLOATS = ("F32", "F16", "BF16")
WHOLE = ("I8", "I32", "I64")
# Names of dtypes in safetensors.
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


class WeightFiles:
    """Implements `Tensors`: the open weight files of one folder.

    Tensors are memory-mapped, and read when they are copied.
    """

    def __init__(self, folder: Path, digests: DigestCache | None = None) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._file_by_tensor: dict[str, Any] = {}  # open files; `safe_open` has no types
        self._path_by_tensor: dict[str, Path] = {}
        self._identity_by_path: dict[Path, FileIdentity] = {}
        self._digests = user_digest_cache() if digests is None else digests
        self._digest_by_tensor: dict[str, str] = {}
        self._unknown_paths: set[Path] = set()  # whose digests are not in the cache

    def __enter__(self) -> WeightFiles:
        try:
            for path in self._paths():
                self._open(path)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._file_by_tensor.clear()
        self._stack.close()

    def names(self) -> list[str]:
        return sorted(self._file_by_tensor)

    def shapes(self) -> dict[str, Shape]:
        files = self._file_by_tensor
        return {name: tuple(files[name].get_slice(name).get_shape()) for name in sorted(files)}

    def check(self, expected: Mapping[str, Expected], is_ignored: Callable[[str], bool]) -> None:
        found = set(self._file_by_tensor)
        _refuse("lacks", sorted(set(expected) - found), self._folder)
        unknown = sorted(name for name in found - set(expected) if not is_ignored(name))
        _refuse("has tensors that this architecture does not use:", unknown, self._folder)
        for name, tensor in expected.items():
            self._check_one(name, tensor)

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._file_by_tensor[name].get_tensor(name)
        if name not in self._digest_by_tensor:  # now, so that a tensor is read from disk once
            self._digest_by_tensor[name] = digest_of(found)
        return found

    def part(self, name: str, index: int) -> Tensor:
        part: Tensor = self._file_by_tensor[name].get_slice(name)[index : index + 1][0]
        return part

    def copy_into(self, name: str, destination: Tensor) -> None:
        destination.copy_(self.tensor(name))

    def quantized(self, name: str, index: int | None = None) -> None:
        """Return nothing: the parts of a quantized matrix are tensors of their own."""

    def identities(self) -> list[FileIdentity]:
        return list(self._identity_by_path.values())

    def digest(self) -> str:
        """Hash all tensors. Raises ModelError if a file has changed since it was opened."""
        digest = hashlib.sha256()
        for name in self.names():
            part = self._file_by_tensor[name].get_slice(name)
            if name not in self._digest_by_tensor:
                self.tensor(name)
            found = [name, part.get_dtype(), part.get_shape(), self._digest_by_tensor[name]]
            digest.update(json.dumps(found).encode())
        self._keep_digests()
        return digest.hexdigest()

    def _keep_digests(self) -> None:
        digests_by_path: dict[Path, dict[str, str]] = {}
        for name, path in self._path_by_tensor.items():
            digests_by_path.setdefault(path, {})[name] = self._digest_by_tensor[name]
        for path, identity in self._identity_by_path.items():
            if _identity_of(path) != identity:
                raise ModelError(f"{path} changed while it was loaded; start again")
            if path in self._unknown_paths:
                self._digests.keep(identity, digests_by_path.get(path, {}))

    def _paths(self) -> list[Path]:
        paths = list_weight_files(self._folder)
        if not paths:
            raise ModelError(
                f"{self._folder} has neither {SINGLE} nor {INDEX}, nor {PICKLED}; weights in other "
                "formats must be saved as safetensors first"
            )
        missing = [path.name for path in paths if not path.is_file()]
        _refuse("lacks the weight file", missing, self._folder)
        return paths

    def _open(self, path: Path) -> None:
        identity = _identity_of(path)
        try:
            opened = self._stack.enter_context(
                PickledFile(path) if path.suffix == ".bin" else safe_open(path, framework="pt")
            )
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is corrupt or cut short ({error}); fetch it again") from error
        for name in names:
            self._file_by_tensor[name] = opened
            self._path_by_tensor[name] = path
        self._identity_by_path[path] = identity
        found = self._digests.find(identity, names)
        self._digest_by_tensor |= found
        if not found:
            self._unknown_paths.add(path)

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


def _identity_of(path: Path) -> FileIdentity:
    try:
        return FileIdentity.of(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from error


class PickledFile:
    """Has the methods of `safe_open` that are used.

    Only tensors are unpickled (`weights_only`), and none is read before it is used: code in a file
    does not run.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # of a damaged file, torch's reader raises any
            reason = str(error).partition("\n")[0]
            raise ModelError(
                f"{path} is no file of tensors that torch can map ({reason}); fetch it again, or "
                "save it as safetensors"
            ) from error
        items = found.items() if isinstance(found, dict) else [("the file", found)]
        for name, value in items:
            if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
                raise ModelError(f"{path}: {name!r} is no tensor; save the tensors of the model")
        self._tensors: dict[str, Tensor] = {name: value.detach() for name, value in found.items()}

    def __enter__(self) -> PickledFile:
        return self

    def __exit__(self, *_error: object) -> None:
        self._tensors.clear()

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].contiguous()

    def get_slice(self, name: str) -> PickledSlice:
        return PickledSlice(self._tensors[name])


class PickledSlice:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, rows: slice) -> Tensor:
        return self._tensor[rows].contiguous()

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return DTYPES.get(self._tensor.dtype, str(self._tensor.dtype))
