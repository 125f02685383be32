"""Imports without garbage collection, and without what commands do not use."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from baton.imports import quick_imports

PROGRAM = """
import sys
from baton.imports import quick_imports

with quick_imports():
    import torch
assert "torch._prims" not in sys.modules and "torch._export" not in sys.modules
inverse = torch.linalg.inv(torch.eye(2) * 2)
assert inverse.tolist() == [[0.5, 0], [0, 0.5]]

assert callable(torch.export.export)
from torch.export import Dim
import torch.export.dynamic_shapes
assert torch.export.dynamic_shapes.Dim is Dim
from torch._meta_registrations import register_meta
assert torch.empty(3, 3, device="meta").cholesky_inverse().shape == (3, 3)
assert not hasattr(torch.export, "no_such_name")
"""


def test_collections_go_on_after_the_block_and_after_its_failure() -> None:
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()

    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()


def test_parts_of_torch_that_no_command_uses_are_imported_when_they_are_used() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
