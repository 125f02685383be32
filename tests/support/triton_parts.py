"""Triton parts of the runner on the CPU, under Triton's interpreter."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from baton.engine.runner.kernels.choose import Parts, choose_parts
from baton.engine.runner.model.ops import Ops


def require_triton() -> None:
    """Skip the test without Triton. Older interpreters do not run the kernels."""
    reason = "the package triton is not installed, or older than 3.9"
    pytest.importorskip("triton", minversion="3.9", reason=reason)


@cache
def interpreted_parts() -> Parts:
    return choose_parts("triton", torch.float32, torch.device("cpu"))


def triton_ops() -> Ops:
    require_triton()
    return interpreted_parts().ops
