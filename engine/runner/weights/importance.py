"""Importance of a model's columns for --quantize int4, from a file of `tools.measure_importance`.

For the matrix `NAME.weight` the file has a tensor `NAME`: the mean square of each input.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from baton.checkpoint.checkpoint import Shape
from baton.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Importance:
    """Mean squares of the inputs of matrices, by name, and the digest of their file."""

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    digest: str = ""


def read_importance(path: str, shapes: Mapping[str, Shape]) -> Importance:
    """Read a file for a model with tensors of these shapes; an empty path means no importance.

    Raises InvalidConfig unless each tensor of the file fits a matrix of the model.
    """
    if not path:
        return Importance()
    try:
        content = Path(path).expanduser().read_bytes()
        columns = load(content)
    except (OSError, SafetensorError) as error:
        raise InvalidConfig(f"quantize-importance {path} cannot be read: {error}") from None
    for name, values in columns.items():
        shape = shapes.get(f"{name}.weight", ())
        if len(shape) != 2:
            fault = "the model has no matrix of that name"
        elif values.shape != shape[1:]:
            fault = f"its shape is {list(values.shape)}, but the matrix has {shape[1]} columns"
        elif not ((values >= 0) & (values.float() < math.inf)).all():
            fault = "all numbers must be finite and at least 0"
        else:
            continue
        raise InvalidConfig(f"{path}: {name!r}: {fault}; measure the importance with this model")
    return Importance(columns, hashlib.sha256(content).hexdigest())
