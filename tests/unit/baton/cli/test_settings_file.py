"""Options from a file, the environment and the command line, and errors in them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.cli import make_app
from baton.cli.program import command_of
from baton.cli.settings_file import CommandOptions, FileOption, GroupOptions, Node, read_settings
from baton.core.errors import InvalidConfig
from tests.support.baton_command import call_baton

ROOT = Path(__file__).parents[4]
PORT = FileOption("port", int)
MEMORY = FileOption("kv_cache_memory", str)
NODES = FileOption("decode_nodes", str)
STOPS = FileOption("stop", str, takes_several=True)
LEASE = FileOption("kv_lease_s", float)
VERIFY = FileOption("kv_verify", bool)


def command(*options: FileOption) -> CommandOptions:
    return CommandOptions({option.name: option for option in options})


COMMANDS: Node = GroupOptions(
    {
        "up": command(PORT, MEMORY),
        "serve": GroupOptions(
            {
                "decode": command(PORT, MEMORY, LEASE, VERIFY),
                "router": command(PORT, NODES, STOPS),
            }
        ),
    }
)


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "baton.toml"
    path.write_text(text, encoding="utf-8")
    return read_settings(path, COMMANDS)


def test_a_key_applies_to_every_command_below_its_table_and_the_nearest_table_wins(
    tmp_path: Path,
) -> None:
    settings = read(
        tmp_path,
        """
        kv-cache-memory = "1GiB"
        [serve]
        port = 1
        [serve.decode]
        port = 2
        """,
    )

    assert settings == {
        "up": {"kv_cache_memory": "1GiB"},
        "serve": {
            "decode": {"kv_cache_memory": "1GiB", "port": 2},
            "router": {"port": 1},
        },
    }


def test_lists_and_numbers_are_converted_to_the_type_of_the_option(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        """
        [serve.decode]
        kv_cache_memory = 4096
        kv_lease_s = 3
        kv_verify = false
        [serve.router]
        decode_nodes = ["a:1", "b:2"]
        stop = ["x", "y"]
        """,
    )

    assert settings["serve"] == {
        "decode": {"kv_cache_memory": "4096", "kv_lease_s": 3, "kv_verify": False},
        "router": {"decode_nodes": "a:1,b:2", "stop": ["x", "y"]},
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[serve.decode]\nprot = 1", r"\[serve.decode\]: unknown key 'prot'; did you mean port\?"),
        ("[serve.decoder]\nport = 1", r"\[serve\]: unknown table 'decoder'; did you mean decode\?"),
        ("[up.more]\nport = 1", r"\[up\]: unknown table 'more'"),
        ("[up]\nkv_lease_s = 1.0", r"\[up\]: unknown key 'kv_lease_s'"),
        ("[up]\nport = '1'", r"\[up\]: port is '1'; it must be a whole number"),
        ("[up]\nport = true", r"port is True; it must be a whole number"),
        ("[up]\nport = 1.5", r"port is 1.5; it must be a whole number"),
        ("[up]\nport = [1]", r"port is a list; it must be a whole number"),
        ("[up]\nkv_cache_memory = false", r"kv_cache_memory is False; it must be text"),
        ("[serve.decode]\nkv_verify = 1", r"kv_verify is 1; it must be true or false"),
        ("[serve.decode]\nkv_lease_s = 'x'", r"kv_lease_s is 'x'; it must be a number"),
        ("[up\nport = 1", r"is not TOML: .*line 1"),
    ],
)
def test_an_error_in_a_settings_file_names_the_file_and_the_key(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(InvalidConfig, match=complaint) as refusal:
        read(tmp_path, text)

    assert str(refusal.value).startswith(str(tmp_path / "baton.toml"))


def test_an_unreadable_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no-such\.toml cannot be read: No such file"):
        read_settings(tmp_path / "no-such.toml", COMMANDS)


def shown(output: str) -> dict[str, tuple[str, str]]:
    """Parse the output of --show-config: the value and its origin, by option."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines()]
    return {row[0]: (row[1], row[2]) for row in rows if row}


def test_the_command_line_overrides_the_environment_which_overrides_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[up]\nprefill = 2\ndecode = 2\nport = 2\npush = 'chunk'\n", encoding="utf-8")

    done = call_baton(
        *("--config", str(path), "up", "--model", "m", "--port", "4", "--show-config"),
        BATON_UP_DECODE="3",
        BATON_UP_PORT="3",
    )

    assert done.returncode == 0, done.stderr
    settings = shown(done.stdout)
    assert settings["prefill"] == ("2", str(path))
    assert settings["decode"] == ("3", "BATON_UP_DECODE")
    assert settings["port"] == ("4", "command line")
    assert settings["push"] == ("chunk", str(path))
    assert settings["dtype"] == ("auto", "default")


def test_a_settings_file_of_the_command_replaces_the_global_settings_file(tmp_path: Path) -> None:
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text("[serve.decode]\nport = 1\npush = 'chunk'\n", encoding="utf-8")
    second.write_text("[serve.decode]\nport = 2\nmodel = 'm'\n", encoding="utf-8")

    done = call_baton(
        *("serve", "decode", "--config", str(second), "--show-config"), BATON_CONFIG=str(first)
    )

    settings = shown(done.stdout)
    assert settings["port"] == ("2", str(second))
    assert settings["push"] == ("layer", "default")


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["up", "--model", "m", "--prot", "1"], {}, "No such option: --prot"),
        (["up", "--model", "m", "--port", "70000"], {}, "'--port'"),
        (["serve", "decode"], {}, "Missing option '--model'; see baton serve decode --help"),
        (["upp"], {}, "No such command 'upp'. Did you mean 'up'?"),
        (["up", "--model", "m"], {"BATON_UP_PORT": "x"}, "BATON_UP_PORT: Invalid value"),
        (["serve", "decode", "--model", "m", "--dtype", "int3"], {}, "dtype 'int3'"),
        (["up", "--model", "m", "--config", "/no-such"], {}, "/no-such cannot be read"),
        (["serve", "decode", "--model", "m", "--push", "layer"], {}, "below [serve.decode], or as"),
        (["up", "--no-kv-verify"], {}, "or as BATON_UP_KV_VERIFY"),
        (["up", "--model", "m"], {"BATON_UP_KV_LEASE_S": "0"}, "kv-lease-s is 0.0"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], environment: dict[str, str], complaint: str
) -> None:
    done = call_baton(*arguments, **environment)

    [line] = done.stderr.splitlines()
    assert line.startswith("baton: error: ")
    assert complaint in line
    assert (done.returncode, done.stdout) == (2, "")


def test_a_process_that_another_one_starts_takes_settings_as_arguments() -> None:
    arguments = ("serve", "decode", "--model", "m", "--kv-lease-s", "2", "--parent-pid", "1")

    done = call_baton(*arguments, "--show-config")

    assert shown(done.stdout)["kv_lease_s"] == ("2.0", "command line")


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs/configuration.md").read_text("utf-8").partition("## Table of settings")[2]

    documented = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(documented) == sorted(settings_of(command_of(make_app())))


def settings_of(command: Any) -> dict[str, None]:
    """Return the settings of a command, or of those in a group, once each in order."""
    if hasattr(command, "commands"):
        found = [settings_of(one) for one in command.commands.values()]
        return {name: None for names in found for name in names}
    return {
        param.name.replace("_", "-"): None
        for param in command.params
        if param.hidden and not param.is_eager
    }


def test_an_unknown_variable_is_reported_with_similar_names() -> None:
    done = call_baton("up", "--model", "m", "--show-config", BATON_UP_THREDS="1")

    assert "BATON_UP_THREDS sets nothing; did you mean BATON_UP_THREADS" in done.stderr


def test_help_imports_no_slow_modules() -> None:
    slow = {
        "torch",
        "grpc",
        "numpy",
        "asyncio",
        "baton.engine.scheduler.scheduler",
        "jinja2",
        "tokenizers",
    }
    reported = f"import sys, baton.cli; print(sorted({slow} & set(sys.modules)))"

    done = subprocess.run(
        [sys.executable, "-c", reported], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
