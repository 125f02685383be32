"""ABI of the kernel library: `abi.py` mirrors `abi.h`, and other libraries are refused."""

from __future__ import annotations

import _ctypes
import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

from baton.core.errors import InvalidConfig
from baton.engine.runner.kernels import abi, choose
from baton.engine.runner.kernels.abi import FUNCTIONS, STRUCTS, KernelAbiMismatch, LinearArgs
from baton.engine.runner.kernels.build import SOURCES, compiler_path
from baton.engine.runner.kernels.native import Kernels
from tests.support.kernels import kernels_by_variant

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
CPU = torch.device("cpu")


def some_library() -> Path:
    return next(iter(kernels_by_variant().values())).path


def cpp_checks(struct: type[ctypes.Structure]) -> list[str]:
    """Return C++ assertions that size, field names, field sizes and offsets match Python."""
    name = f"baton::{struct.__name__}"
    checks = [f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});"]
    for field, *_ in struct._fields_:
        found = getattr(struct, field)
        checks += [
            f"static_assert(offsetof({name}, {field}) == {found.offset});",
            f"static_assert(sizeof({name}::{field}) == {found.size});",
        ]
    return checks


@needs_kernels
def test_structs_have_the_same_fields_in_python_and_in_cpp(tmp_path: Path) -> None:
    compiler = compiler_path()
    assert compiler is not None
    checks = [check for struct in STRUCTS for check in cpp_checks(struct)]
    source = tmp_path / "checks.cpp"
    source.write_text("\n".join(["#include <cstddef>", '#include "abi.h"', *checks, ""]))

    command = [compiler, "-std=c++20", f"-I{SOURCES}", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_functions_have_the_same_number_of_arguments_in_python_and_in_cpp() -> None:
    header = (SOURCES / "abi.h").read_text(encoding="utf-8")
    declarations = re.findall(r"^[\w:]+ (baton_\w+)\(([^)]*)\);", header, re.MULTILINE)
    declared = {
        name: len(list(filter(None, parameters.split(",")))) for name, parameters in declarations
    }

    assert {name: len(arguments) for name, (_, arguments) in FUNCTIONS.items()} == declared


def test_a_misspelled_field_is_refused() -> None:
    with pytest.raises(AttributeError):
        LinearArgs(num_token=1)


@needs_kernels
def test_a_library_with_another_abi_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    path = some_library()
    version = abi.ABI_VERSION
    monkeypatch.setattr(abi, "ABI_VERSION", version + 1)

    with pytest.raises(KernelAbiMismatch) as refused:
        Kernels(path, 1)

    assert f"{path} does not fit" in str(refused.value)
    assert f"its ABI version is {version}, not {version + 1}" in str(refused.value)
    assert "delete the file" in str(refused.value)


@needs_kernels
def test_a_library_with_another_struct_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = type("LinearArgs", (LinearArgs,), {"_fields_": [("more", ctypes.c_int64)]})
    size = ctypes.sizeof(LinearArgs)
    monkeypatch.setattr(abi, "STRUCTS", (longer,))

    with pytest.raises(KernelAbiMismatch, match=f"its LinearArgs has {size} bytes, not {size + 8}"):
        Kernels(some_library(), 1)


def test_a_library_without_a_function_is_refused() -> None:
    with pytest.raises(KernelAbiMismatch, match="has no function baton_"):
        Kernels(Path(_ctypes.__file__), 1)


@needs_kernels
def test_a_node_that_requires_native_kernels_does_not_start_with_another_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abi, "ABI_VERSION", abi.ABI_VERSION + 1)

    with pytest.raises(InvalidConfig, match="does not fit this version of Baton"):
        choose.choose_parts("native", torch.bfloat16, CPU)
