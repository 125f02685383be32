"""The file of a repository that a name with a quantization means."""

from __future__ import annotations

import pytest

from baton.checkpoint.gguf.file_choice import choose_files
from baton.core.errors import ModelError

FILES = (
    "README.md",
    "Qwen3-4B-Q4_K_M.gguf",
    "Qwen3-4B-Q8_0.gguf",
    "Qwen3-4B.BF16.gguf",
    "mmproj-F16.gguf",
    "UD-Q2_K_XL/Qwen3-4B-UD-Q2_K_XL-00001-of-00002.gguf",
    "UD-Q2_K_XL/Qwen3-4B-UD-Q2_K_XL-00002-of-00002.gguf",
)


@pytest.mark.parametrize(
    ("quantization", "chosen"),
    [
        ("", ["Qwen3-4B-Q4_K_M.gguf"]),
        ("q8_0", ["Qwen3-4B-Q8_0.gguf"]),
        ("BF16", ["Qwen3-4B.BF16.gguf"]),
        ("Q2_K_XL", list(FILES[5:])),
    ],
)
def test_a_quantization_chooses_its_file_or_all_its_parts(
    quantization: str, chosen: list[str]
) -> None:
    assert choose_files("maker/model", FILES, quantization) == chosen


def test_the_only_file_needs_no_quantization() -> None:
    assert choose_files("maker/model", ["model-Q5_0.gguf"], "") == ["model-Q5_0.gguf"]


def test_a_missing_quantization_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ModelError, match=r"in Q6_K; it has .*Q8_0.*as in maker/model:Q4_K_M"):
        choose_files("maker/model", FILES, "Q6_K")


def test_a_repository_without_weights_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no GGUF file, and no \*.safetensors"):
        choose_files("maker/model", ["README.md", "model.bin"], "")
