"""Names of models: what they stand for, how clients know them, and what is refused."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from baton.checkpoint import hub as hub_module
from baton.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from baton.checkpoint.hub import model_root, open_checkpoint, resolve_model, served_name
from baton.core.errors import ModelError


def a_folder(parent: Path, *files: str) -> Path:
    folder = parent / "SmolLM2-135M"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
    return folder


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = a_folder(tmp_path, "model.q8_0.gguf") / "model.q8_0.gguf"

    assert resolve_model(str(file)) == file
    assert isinstance(open_checkpoint(str(file)), GgufCheckpoint)
    assert (served_name(str(file)), model_root(str(file))) == ("model.q8_0.gguf", str(file))


def test_a_gguf_file_is_recognised_by_its_content(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "weights.gguf")
    blob = (folder / "weights.gguf").rename(folder / "sha256-1234")

    assert resolve_model(str(blob)) == blob


@pytest.mark.parametrize("config", [(), ("config.json",)])
def test_a_folder_with_one_gguf_file_means_that_file(
    tmp_path: Path, config: tuple[str, ...]
) -> None:
    folder = a_folder(tmp_path, "model.gguf", *config)

    assert resolve_model(str(folder)) == folder / "model.gguf"


def test_a_folder_with_the_parts_of_a_model_means_the_first_part(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")

    assert resolve_model(str(folder)) == folder / "m-00001-of-00002.gguf"


def test_a_folder_with_several_gguf_models_is_refused_with_their_names(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "model.q4_0.gguf", "model.q8_0.gguf")

    with pytest.raises(ModelError, match=r"has 2 models: name one of .*q4_0.gguf, .*q8_0.gguf"):
        resolve_model(str(folder))


def test_a_folder_with_gguf_files_next_to_safetensors_is_used(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "model.gguf", "config.json", "model.safetensors")

    assert resolve_model(str(folder)) == folder


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return a cache of huggingface_hub with a repository of GGUF files."""
    repository = tmp_path / "models--maker--model-GGUF"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("model-Q4_K_M.gguf", "model-Q8_0.gguf", "mmproj-model-f16.gguf"):
        (snapshot / name).write_bytes(b"GGUF")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("maker/model-GGUF", "model-Q4_K_M.gguf"),
        ("maker/model-GGUF:Q8_0", "model-Q8_0.gguf"),
        ("maker/model-GGUF:q4_k_m", "model-Q4_K_M.gguf"),
    ],
)
def test_a_hub_name_with_a_quantization_means_the_file_in_the_cache(
    name: str, file: str, hub: Path
) -> None:
    assert resolve_model(name, offline=True, cache=hub).name == file
    assert served_name(name) == name


def test_a_quantization_that_is_not_in_the_cache_is_not_found_offline(hub: Path) -> None:
    with pytest.raises(ModelError, match="no model 'maker/model-GGUF:Q5_0' in the Hugging Face"):
        resolve_model("maker/model-GGUF:Q5_0", offline=True, cache=hub)


def test_a_path_to_a_file_is_refused_with_the_folder_to_use(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, "config.json", "model.safetensors")

    with pytest.raises(ModelError, match=rf"is a file; name its folder: {folder}$"):
        resolve_model(str(folder / "model.safetensors"))


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


def test_a_look_up_of_the_hub_that_hangs_ends_within_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    def hang(*_: object, **__: object) -> None:
        is_over.wait(timeout=30)
        raise socket.gaierror("the look-up has ended")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(hub_module, "ANSWER_TIMEOUT_S", 0.2)
    try:
        with pytest.raises(ModelError, match=r"the hub did not answer within 0.2 s.* its folder"):
            resolve_model("maker/model", cache=tmp_path)
    finally:
        is_over.set()
