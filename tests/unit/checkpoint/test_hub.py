"""Names of models: what they stand for, how clients know them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.checkpoint.hub import model_root, resolve_model_folder, served_name
from baton.core.errors import ModelError


def a_folder(parent: Path, *files: str) -> Path:
    folder = parent / "SmolLM2-135M"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
    return folder


def test_a_gguf_file_is_refused_with_the_alternative(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "model.q8_0.gguf")

    with pytest.raises(ModelError, match=r"GGUF is not supported yet.*safetensors.*--quantize"):
        resolve_model_folder(str(folder / "model.q8_0.gguf"))


def test_a_gguf_file_is_recognised_by_its_content(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "weights.gguf")
    blob = (folder / "weights.gguf").rename(folder / "sha256-1234")

    with pytest.raises(ModelError, match="GGUF is not supported yet"):
        resolve_model_folder(str(blob))


@pytest.mark.parametrize("config", [(), ("config.json",)])
def test_a_folder_with_only_gguf_files_is_refused_with_the_alternative(
    tmp_path: Path, config: tuple[str, ...]
) -> None:
    folder = a_folder(tmp_path, "model.gguf", *config)

    with pytest.raises(ModelError, match="GGUF is not supported yet"):
        resolve_model_folder(str(folder))


def test_a_folder_with_gguf_files_next_to_safetensors_is_used(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "model.gguf", "config.json", "model.safetensors")

    assert resolve_model_folder(str(folder)) == folder


@pytest.mark.parametrize("name", ["missing.gguf", "maker/model-GGUF", "/nowhere/missing.gguf"])
def test_an_unknown_hub_name_of_gguf_weights_is_refused_with_the_alternative(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="GGUF is not supported yet"):
        resolve_model_folder(name, offline=True, cache=tmp_path)


def test_a_path_to_a_file_is_refused_with_the_folder_to_use(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "config.json", "model.safetensors")

    with pytest.raises(ModelError, match=rf"is a file; name its folder: {folder}$"):
        resolve_model_folder(str(folder / "model.safetensors"))


def test_the_served_name_of_a_folder_is_its_last_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_folder(tmp_path)
    (tmp_path / "current").symlink_to(folder)
    monkeypatch.chdir(folder)

    names = [served_name(given) for given in (str(folder), f"{folder}/", ".", "../current")]

    assert names == ["SmolLM2-135M", "SmolLM2-135M", "SmolLM2-135M", "current"]
    assert [model_root(given) for given in (str(folder), ".")] == [str(folder)] * 2


def test_the_served_name_of_a_hub_model_is_its_hub_name() -> None:
    """Its folder in the cache has the name of a commit."""
    assert served_name("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"
    assert model_root("HuggingFaceTB/SmolLM2-135M") == "HuggingFaceTB/SmolLM2-135M"
