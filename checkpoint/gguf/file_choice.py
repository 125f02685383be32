"""Selects the GGUF file of a repository that a name means: `USER/REPO:Q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from baton.checkpoint.gguf.gguf_file import is_later_part, part_names
from baton.checkpoint.gguf.header import MAGIC
from baton.core.errors import ModelError

DEFAULT = "Q4_K_M"  # llama.cpp's and Ollama's
QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d\w*|MXFP4\w*|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE
)
PROJECTOR = "mmproj"  # in names of files that turn images into embeddings
PROJECTOR_TYPES = ("BF16", "F16", "F32", "Q8_0")  # the preferred ones first


def is_gguf(path: Path) -> bool:
    """Return whether a file is named or begins like GGUF. Ollama names files by their digest."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def list_models(names: Iterable[str]) -> list[str]:
    """Return the files of models, only the first part of each, sorted."""
    return [
        name
        for name in sorted(names)
        if name.lower().endswith(".gguf") and not is_projector(name) and not is_later_part(name)
    ]


def choose_files(repository: str, names: Sequence[str], quantization: str) -> list[str]:
    """Return the file with this quantization, or all its parts, and that of a vision tower.

    Without a quantization it is DEFAULT, or the only one. Raises ModelError, which lists those that
    there are.
    """
    found: dict[str, str] = {}
    for name in list_models(names):
        found.setdefault(_quantization(name), name)
    asked = quantization.upper() or (next(iter(found)) if len(found) == 1 else DEFAULT)
    if asked not in found:
        example = next(iter(found))
        raise ModelError(
            f"{repository} has no GGUF file in {asked}; it has {', '.join(found)}. Name one, as in "
            f"{repository}:{example}"
        )
    return [*part_names(found[asked]), *order_projectors(names)[:1]]


def is_projector(name: str) -> bool:
    """Return whether a file's name is that of a vision tower."""
    return name.lower().endswith(".gguf") and PROJECTOR in name.lower()


def order_projectors(names: Iterable[str]) -> list[str]:
    """Return the files with vision towers, the one to take first."""
    found = sorted(filter(is_projector, names))
    others = len(PROJECTOR_TYPES)
    place = {kind: index for index, kind in enumerate(PROJECTOR_TYPES)}
    return sorted(found, key=lambda name: place.get(_quantization(name), others))


def _quantization(name: str) -> str:
    """Return the last word of a file's path that names a quantization; empty without one."""
    words = QUANTIZATION.findall(name.removesuffix(".gguf"))
    return str(words[-1]).upper() if words else ""
