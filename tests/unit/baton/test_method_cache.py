"""Compiled methods of dataclasses, kept in a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from baton import method_cache
from baton.method_cache import MethodCache


def make_point(names: tuple[str, ...] = ("x", "y")) -> Any:
    return dataclasses.make_dataclass("Point", names, frozen=True, slots=True)


def check_point(point: Any) -> None:
    assert repr(point(1, 2)) == "Point(x=1, y=2)"
    assert point(1, 2) == point(1, 2) != point(1, 3)
    assert hash(point(1, 2)) == hash(point(1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        point(1, 2).x = 3


def test_a_later_process_compiles_no_method_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "methods"
    with MethodCache(path).in_use():
        check_point(make_point())
    assert list(path.parent.iterdir()) == [path]

    def compile_nothing(*_given: object, **_more: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(method_cache, "compile", compile_nothing, raising=False)
    with MethodCache(path).in_use():
        check_point(make_point())
        with pytest.raises(AssertionError):
            make_point(("x", "z"))
    assert not hasattr(dataclasses, "exec")
    check_point(make_point())


@pytest.mark.parametrize("content", [b"", b"\0", b"i\1\0\0\0", b"\xfbno marshal"])
def test_a_damaged_file_is_written_again(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "methods"
    path.write_bytes(content)
    with MethodCache(path).in_use():
        check_point(make_point())
    assert path.read_bytes() != content


def test_a_file_with_a_wrong_bit_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "methods"
    with MethodCache(path).in_use():
        make_point()
    content = path.read_bytes()
    for place in range(0, len(content), len(content) // 100):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with MethodCache(path).in_use():
            check_point(make_point())
        assert path.read_bytes() == content


def test_a_file_that_cannot_be_replaced_leaves_no_part(tmp_path: Path) -> None:
    path = tmp_path / "methods"
    path.mkdir()
    with MethodCache(path).in_use():
        check_point(make_point())
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_writable_folder_methods_are_compiled(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with MethodCache(tmp_path / "file" / "methods").in_use():
        check_point(make_point())


def test_a_file_that_grew_too_long_keeps_what_the_last_process_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "methods"
    with MethodCache(path).in_use():
        make_point()
    long = path.stat().st_size
    monkeypatch.setattr(method_cache, "MAX_METHODS", 2)
    with MethodCache(path).in_use():
        make_point(("z",))
    assert path.stat().st_size < long
