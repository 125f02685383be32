"""Options for the models of a router, and the profiles that they load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

from baton.cli.program import command_of
from baton.cli.settings_file import CommandOptions, FileOption, read_settings
from baton.cli.signatures import inherit_options
from baton.core.errors import InvalidConfig
from baton.core.options import build_config
from baton.router.loading import load_profiles
from baton.router.model_options import ByName, ModelOptions
from baton.router.text_events.table import REASONING_FORMATS
from baton.router.values import NO_PARSING, Parsing, ReasoningTokens, TextPrompt
from tests.support.models import EOS_TOKEN_ID, save_tokenizer


def options(**given: Sequence[str]) -> ModelOptions:
    return build_config(ModelOptions, {name: list(written) for name, written in given.items()})


def from_command_line(*arguments: str, variable: str | None = None) -> ModelOptions:
    """Return the options as `baton serve router` gets them."""
    found: list[ModelOptions] = []
    app = typer.Typer()

    @app.command()
    @inherit_options(ModelOptions)
    def command(**given: object) -> None:
        found.append(build_config(ModelOptions, given))

    environment = {} if variable is None else {"ROUTER_MODEL": variable}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        command_of(app).main(list(arguments), standalone_mode=False, auto_envvar_prefix="ROUTER")
    return found[0]


def a_folder(path: Path) -> Path:
    save_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return path


def test_models_are_repeated_on_the_command_line_and_separated_by_spaces_in_a_variable() -> None:
    both = (ByName("/models/a"), ByName("/models/b", "chat"))

    assert from_command_line().folders == ()
    assert from_command_line("--model", "/models/a", "--model=chat=/models/b").folders == both
    assert from_command_line(variable="/models/a chat=/models/b").folders == both


def test_a_settings_file_has_one_model_or_a_list(tmp_path: Path) -> None:
    command = CommandOptions({"model": FileOption("model", str, takes_several=True)})
    path = tmp_path / "baton.toml"
    for written, expected in (('"/a"', ["/a"]), ('["/a", "b=/b"]', ["/a", "b=/b"])):
        path.write_text(f"model = {written}")
        given = read_settings(path, command)
        assert given == {"model": expected}
        assert build_config(ModelOptions, given).folders[0] == ByName("/a")


def test_a_folder_whose_path_has_an_equals_sign_is_not_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()

    assert options(model=[str(folder)]).folders == (ByName(str(folder)),)


def test_parsers_apply_to_all_models_or_to_one() -> None:
    one = options(tool_parser=["hermes", "b=llama3_json"], reasoning_parser=["b=qwen3"])

    assert one.parsing_of("a") == one.parsing_of() == Parsing("hermes")
    assert one.parsing_of("b") == Parsing("llama3_json", "qwen3")
    assert ModelOptions().parsing_of("a") == NO_PARSING


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": ["=/a"]}, "NAME=FOLDER"),
        ({"model": ["a="]}, "NAME=FOLDER"),
        ({"model": ["a=/a", "a=/b"]}, "--model is given twice for a"),
        ({"tool_parser": ["other"]}, "choose one of auto, none, hermes, "),
        ({"tool_parser": ["=hermes"]}, "MODEL=PARSER"),
        ({"reasoning_parser": ["hermes"]}, "choose one of auto, none, qwen3, deepseek_r1"),
        ({"reasoning_parser": ["qwen3", "deepseek_r1"]}, "given twice for all models"),
    ],
)
def test_invalid_options_are_refused(given: dict[str, list[str]], expected: str) -> None:
    with pytest.raises(InvalidConfig, match=expected):
        options(**given)


def test_profiles_have_the_folders_tokenizers_names_and_parsers(tmp_path: Path) -> None:
    first, second = a_folder(tmp_path / "first"), a_folder(tmp_path / "second")
    given = options(model=[str(first), f"chat={second}"], tool_parser=["chat=hermes"])

    one, two = load_profiles(given)

    assert (one.name, one.is_name_assumed, one.root) == ("first", True, str(first))
    assert (two.name, two.is_name_assumed, two.root) == ("chat", False, str(second))
    assert (one.parsing, two.parsing) == (NO_PARSING, Parsing("hermes"))
    assert one.text.token_ids(TextPrompt("the quick"))


def test_profiles_with_one_name_and_parsers_without_a_model_are_refused(tmp_path: Path) -> None:
    same = [a_folder(tmp_path / place / "same") for place in ("a", "b")]

    with pytest.raises(InvalidConfig, match="two models have the name 'same'"):
        load_profiles(options(model=[str(folder) for folder in same]))
    with pytest.raises(InvalidConfig, match="no --model has the name 'other'; there are: same"):
        load_profiles(options(model=[str(same[0])], tool_parser=["other=hermes"]))


def test_parsers_follow_the_chat_template_unless_an_option_sets_them(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "model")
    change_texts(folder, {"<pad>": "</think>", "<s>": "<think>"})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "<tool_call></tool_call> <think> </think>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    [by_template] = load_profiles(options(model=[str(folder)]))
    [by_option] = load_profiles(options(model=[str(folder)], reasoning_parser=["none"]))
    [other] = load_profiles(options(model=[str(folder)], reasoning_parser=["mistral"]))

    marks = REASONING_FORMATS["qwen3"]
    assert by_template.parsing == Parsing("hermes", "qwen3", ReasoningTokens(marks, 1, (0,)))
    assert by_option.parsing == Parsing("hermes")
    assert other.parsing == Parsing("hermes", "mistral")  # its marks are plain text here


def change_texts(folder: Path, texts: dict[str, str]) -> None:
    """Replace special tokens of a tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        written = (folder / name).read_text()
        for old, new in texts.items():
            written = written.replace(json.dumps(old), json.dumps(new))
        (folder / name).write_text(written)
