"""Imports without garbage collection, and without what commands do not use."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

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

# A thread executes `late`, which imports `between`. This is being imported by another thread,
# which reads a late module there.
IN_THREADS = """
import sys, threading
from baton import imports

imports.SELDOM_USED = {"late", "later"}
sys.begun, sys.imported = threading.Event(), threading.Event()
with imports.quick_imports():
    import late, later
thread = threading.Thread(target=lambda: late.value)
thread.start()
sys.begun.wait()
import between
thread.join()
assert (late.value, later.value) == (1, 2)
"""
LATE = "import sys; sys.begun.set(); sys.imported.wait(); import between; value = 1"
BETWEEN = "import sys, late, later; sys.imported.set(); getattr({}, 'value', None)"
LONGEST_S = 60


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


@pytest.mark.parametrize("read", ["later", "late"])
def test_threads_that_wait_for_imports_of_each_other_go_on(read: str, tmp_path: Path) -> None:
    files = {"late": LATE, "later": "value = 2", "between": BETWEEN.format(read)}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)

    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}){IN_THREADS}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LONGEST_S)
