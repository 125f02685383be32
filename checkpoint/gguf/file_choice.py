"""Selects the GGUF file of a repository that a name means: `USER/REPO:Q4_K_M`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from baton.checkpoint.gguf.gguf_file import SPLIT_NAME
from baton.core.errors import ModelError

DEFAULT = "Q4_K_M"  # llama.cpp's and Ollama's
QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d\w*|MXFP4\w*|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE
)
PROJECTOR = "mmproj"  # in names of files that turn images into embeddings
PROJECTOR_TYPES = ("BF16", "F16", "F32", "Q8_0")  # the preferred ones first


def choose_files(repository: str, names: Iterable[str], quantization: str) -> list[str]:
    """Return the file with this quantization, or all parts of it, the first one first.

    Without a quantization it is DEFAULT, or the only one. Raises ModelError, which lists those that
    there are.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not is_projector(name):
            found.setdefault(_quantization(name), []).append(name)
    if not found:
        raise ModelError(f"{repository} has no GGUF file, and no *.safetensors")
    asked = quantization.upper() or (next(iter(found)) if len(found) == 1 else DEFAULT)
    if asked not in found:
        example = next(iter(found))
        raise ModelError(
            f"{repository} has no GGUF file in {asked}; it has {', '.join(found)}. Name one, as in "
            f"{repository}:{example}"
        )
    first, *others = found[asked]
    match = SPLIT_NAME.fullmatch(PurePosixPath(first).name)
    if match is None:
        return [first]
    stem = f"{match['stem']}-"
    return [first, *(name for name in others if PurePosixPath(name).name.startswith(stem))]


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
