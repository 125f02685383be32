"""ABI of the kernel library: `abi.py` reads `abi.h` as a compiler does."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from baton.engine.runner.kernels.abi import FUNCTIONS, STRUCTS
from baton.engine.runner.kernels.build import SOURCES, compiler_path

needs_compiler = pytest.mark.skipif(compiler_path() is None, reason="no C++ compiler here")


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


PROLOGUE = """
#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include "abi.h"

template <typename Result, typename... Arguments>
constexpr bool takes(Result (*)(Arguments...), std::initializer_list<std::size_t> sizes) {
    const std::initializer_list<std::size_t> found = {sizeof(Arguments)...};
    return std::ranges::equal(found, sizes);
}
"""


@needs_compiler
def test_structs_and_functions_are_the_same_in_python_and_in_cpp(tmp_path: Path) -> None:
    compiler = compiler_path()
    assert compiler is not None
    checks = [check for struct in STRUCTS.values() for check in cpp_checks(struct)]
    for name, (_, arguments) in FUNCTIONS.items():
        sizes = ", ".join(str(ctypes.sizeof(argument)) for argument in arguments)
        checks.append(f"static_assert(takes({name}, {{{sizes}}}));")
    source = tmp_path / "checks.cpp"
    source.write_text("\n".join([PROLOGUE, *checks, ""]))

    command = [compiler, "-std=c++20", f"-I{SOURCES}", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_all_declared_functions_are_found() -> None:
    header = (SOURCES / "abi.h").read_text(encoding="utf-8")

    assert set(FUNCTIONS) == set(re.findall(r"\bbaton_\w+(?=\()", header))


def test_a_misspelled_field_is_refused() -> None:
    with pytest.raises(AttributeError):
        STRUCTS["LinearArgs"](num_token=1)
