"""Check that Triton kernels can run here. Does not import Triton."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from baton.core.errors import InvalidConfig

INTERPRETER_VARIABLE = "TRITON_INTERPRET"


def require_triton(device: torch.device) -> None:
    """Raise InvalidConfig if Triton is not installed or cannot compute on the device."""
    if find_spec("triton") is None:
        raise InvalidConfig(
            "kernels 'triton' need the package triton: pip install 'baton[gpu]' on Linux"
        )
    if device.type == "cpu" and not uses_interpreter():
        raise InvalidConfig(
            f"kernels 'triton' need --device cuda, not {device}; to try them on a CPU, very "
            f"slowly, set {INTERPRETER_VARIABLE}=1"
        )


def uses_interpreter() -> bool:
    """Return whether Triton interprets kernels. It reads the variable as kernels are imported."""
    return os.environ.get(INTERPRETER_VARIABLE, "").lower() in ("1", "true", "yes", "on", "y")
