"""The file of a repository that a name with a quantization means."""

from __future__ import annotations

import pytest

from baton.checkpoint.gguf.file_choice import choose_files
from baton.core.errors import ModelError

TOWER = "mmproj-F16.gguf"
FILES = (
    "README.md",
    "Qwen3-4B-Q4_K_M.gguf",
    "Qwen3-4B-Q8_0.gguf",
    "Qwen3-4B.BF16.gguf",
    TOWER,
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
def test_a_quantization_chooses_its_file_or_all_its_parts_and_the_tower(
    quantization: str, chosen: list[str]
) -> None:
    assert choose_files("maker/model", FILES, quantization) == [*chosen, TOWER]


def test_the_only_file_needs_no_quantization() -> None:
    assert choose_files("maker/model", ["model-Q5_0.gguf"], "") == ["model-Q5_0.gguf"]


def test_a_missing_quantization_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ModelError, match=r"in Q6_K; it has .*Q8_0.*as in maker/model:Q4_K_M"):
        choose_files("maker/model", FILES, "Q6_K")


def test_all_parts_are_chosen_by_the_name_of_the_first() -> None:
    """So a download that lacks one is not complete."""
    assert choose_files("maker/model", FILES[:-1], "Q2_K_XL") == [*FILES[5:], TOWER]
