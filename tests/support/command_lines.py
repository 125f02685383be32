"""Checks of arguments in deployment files against the real command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import typer.testing
from typer.testing import CliRunner, Result

from baton.cli import make_app
from baton.cli.command import ENVIRONMENT_PREFIX
from baton.cli.program import command_of


def invoke(app: typer.Typer, arguments: Sequence[str], **options: Any) -> Result:
    """Run a command line in this process. Its command is built once for all tests."""
    with patch.object(typer.testing, "_get_command", command_of):
        return CliRunner().invoke(app, arguments, **options)


def complaint_about(arguments: Sequence[str], environment: Mapping[str, str] = {}) -> str:
    """Return the error message for these arguments; empty if they are valid."""
    ended = invoke(
        make_app(),
        [*arguments, "--show-config"],
        auto_envvar_prefix=ENVIRONMENT_PREFIX,
        env=environment,
    )
    is_warned = "warning" in ended.output
    return ended.output or repr(ended.exception) if ended.exit_code or is_warned else ""


def option(arguments: Sequence[str], name: str) -> str:
    """Return the value of --name=value."""
    [found] = [one for one in arguments if one.startswith(f"--{name}=")]
    return found.partition("=")[2]
