"""Fixtures of runner tests, and launches of Triton kernels on a GPU if there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch with one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama."""
    from tests.support.models import VARIANTS, make_model_folder

    return make_model_folder(tmp_path_factory.mktemp("llama"), VARIANTS["llama"])
