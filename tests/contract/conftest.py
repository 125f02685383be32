"""Launches of Triton kernels on a GPU, if they are not interpreted and there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _kernels_on_a_gpu() -> Iterator[None]:
    if os.environ["TRITON_INTERPRET"] != "0":
        yield
        return
    import torch

    from tests.support.triton_parts import kernels_on_copies

    if not torch.cuda.is_available():
        yield
        return
    with kernels_on_copies(torch.device("cuda")):
        yield
