"""Weights that torch has pickled (`pytorch_model.bin`), read like a file of safetensors.

Only tensors are unpickled (`weights_only`), and none is read before it is used: code in a file does
not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from baton.core.errors import ModelError

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


class PickledFile:
    """Has the methods of `safe_open` that are used."""

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
