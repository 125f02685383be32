"""Model folders that somebody made to do harm: each is refused by name, and soon."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.hub import resolve_model
from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.errors import InvalidConfig, InvalidRequest, ModelError
from baton.engine.runner.load import RunnerConfig, load_runner

DEMO = Path(__file__).parents[2] / "models" / "demo"
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LONG_NUMBER = b'{"vocab_size": ' + b"9" * 10_000 + b"}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def load(folder: Path, **settings: Any) -> None:
    """Load all that the processes of a cluster read from the folder."""
    with load_runner(RunnerConfig(str(folder), kv_cache_bytes=1 << 22, **settings)):
        load_tokenizer(folder)


def rewrite(path: Path, change: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def write_index(folder: Path, name: str) -> None:
    weight_map = {"model.norm.weight": name}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("is_relative", [True, False])
def test_an_index_cannot_name_files_outside_its_folder(
    folder: Path, tmp_path: Path, is_relative: bool
) -> None:
    secret = Path(shutil.move(folder / "model.safetensors", tmp_path / "secret.safetensors"))
    write_index(folder, f"../{secret.name}" if is_relative else str(secret))

    with pytest.raises(ModelError, match=r"secret\.safetensors' is not the name of a file in this"):
        load(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b.safetensors", "a\0b", "a\\b"])
def test_an_index_can_name_only_files(folder: Path, name: str) -> None:
    write_index(folder, name)

    with pytest.raises(ModelError, match="is not the name of a file in this folder"):
        load(folder)


def test_an_index_in_the_cache_of_the_hub_cannot_name_other_files(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--maker--model" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    shutil.copy(DEMO / "config.json", snapshot)
    write_index(snapshot, "/etc/passwd")
    refs = tmp_path / "models--maker--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("1234")

    with pytest.raises(ModelError, match="'/etc/passwd' is not the name"):
        resolve_model("maker/model", offline=True, cache=tmp_path)


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", [DEEP, LONG_NUMBER, b"\xff"], ids=["deep", "long", "no text"])
def test_an_unparsable_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)

    with pytest.raises(ModelError, match=rf"{name} (is nested too deeply|cannot be read)"):
        load(folder)


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_special_files_are_not_read(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    make: dict[str, Callable[[], None]] = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
    }
    make[kind]()

    with pytest.raises(ModelError, match=f"{name} is not a file"):
        load(folder)


def test_a_pipe_of_weights_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")

    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        load(folder)


def test_a_file_that_is_too_large_is_not_parsed(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 40)  # a sparse file

    with pytest.raises(ModelError, match=r"config\.json has more than 67108864 bytes"):
        load(folder)


def test_a_context_beyond_the_memory_requires_max_model_len(folder: Path) -> None:
    rewrite(folder / "config.json", {"max_position_embeddings": 2**31 - 1})

    with pytest.raises(InvalidConfig, match=r"2147483647 tokens.*set --max-model-len"):
        load(folder)

    load(folder, max_model_len=512)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 5}, "top_p is 5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"eos_token_id": 10**30}, "'eos_token_id' is 10+; it must be a token id"),
        ({"eos_token_id": [True]}, r"'eos_token_id' is \[True\]"),
    ],
)
def test_invalid_generation_defaults_are_named(
    folder: Path, change: Mapping[str, Any], named: str
) -> None:
    rewrite(folder / "generation_config.json", change)

    with pytest.raises(ModelError, match=rf"generation_config\.json.*{named}"):
        load(folder)


@pytest.mark.parametrize("templates", [[1], [{"template": "x"}], [{"name": "default"}]])
def test_a_list_without_valid_chat_templates_is_named(folder: Path, templates: list[Any]) -> None:
    rewrite(folder / "tokenizer_config.json", {"chat_template": templates})

    with pytest.raises(ModelError, match=r"'chat_template' is .* must be a text, or list names"):
        load(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_chat_template_that_is_not_text_is_named(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"\xff")

    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for a in range(99999) %}" * 9 + "{% endfor %}" * 9,
    ],
    ids=["nested", "recursive", "endless"],
)
def test_an_endless_chat_template_fails_only_its_request(folder: Path, template: str) -> None:
    rewrite(folder / "tokenizer_config.json", {"chat_template": template})
    tokenizer = load_tokenizer(folder)

    assert not tokenizer.supports_tools
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("template", ["{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "x" * 65537])
def test_a_chat_template_that_cannot_be_compiled_is_named(folder: Path, template: str) -> None:
    rewrite(folder / "tokenizer_config.json", {"chat_template": template})
    tokenizer = load_tokenizer(folder)

    assert not tokenizer.supports_tools
    with pytest.raises(ModelError, match="chat template is broken"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
