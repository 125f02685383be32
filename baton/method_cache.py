"""Compiled methods of dataclasses, kept in a file.

Python compiles the methods of every dataclass at each start: 2,000 of them in a node, which take a
fifth of its imports.
"""

from __future__ import annotations

import dataclasses
import marshal
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

from baton.core.user_cache import user_cache_folder

# Above it, methods that this process has not used are left out: those of old versions.
MAX_METHODS = 10_000
DIGEST_BYTES = 32  # in front of the code


class MethodCache:
    """Compiled code by source text, so that a change of the source never finds old code."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._code = _read(path)
        self._used: dict[str, Any] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the dataclasses that are made in the block take their methods from the cache."""
        # Its methods are functions in source text, which it executes by this name.
        setattr(dataclasses, "exec", self._execute)  # noqa: B010
        try:
            yield
        finally:
            delattr(dataclasses, "exec")
            self._save()

    def _execute(self, source: str, names: dict[str, Any], made: dict[str, Any]) -> None:
        code = self._code.get(source) or self._used.get(source)
        if code is None:
            code = compile(source, "<string>", "exec", dont_inherit=True)
        self._used[source] = code
        exec(code, names, made)

    def _save(self) -> None:
        if self._used.keys() <= self._code.keys():
            return
        self._code = self._code | self._used
        if len(self._code) > MAX_METHODS:
            self._code = self._used
        content = marshal.dumps(self._code)
        part = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_bytes(sha256(content).digest() + content)
                part.rename(self._path)
            except OSError:
                part.unlink(missing_ok=True)


def open_method_cache() -> MethodCache | None:
    """Return the cache of this user and this version of Python, or None without a home."""
    folder = user_cache_folder()
    return None if folder is None else MethodCache(folder / f"methods-2-{MAGIC_NUMBER.hex()}")


def _read(path: Path) -> dict[str, Any]:
    """Return the code of a file whose digest is right: other code can end the interpreter."""
    try:
        stored = path.read_bytes()
    except OSError:
        return {}
    digest, content = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    if sha256(content).digest() != digest:
        return {}
    code: dict[str, Any] = marshal.loads(content)
    return code
