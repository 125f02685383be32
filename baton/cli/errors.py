"""Error output of commands: one line on standard error, and an exit code for scripts."""

from __future__ import annotations

import os
import sys

import typer

from baton.cli.command import origin
from baton.core.errors import InvalidConfig, InvalidRequest, NamedError

FAILED = 1
WRONG_USAGE = 2
USAGE = (InvalidConfig, InvalidRequest)


def print_error(message: str) -> None:
    print(f"baton: error: {message}", file=sys.stderr)


def print_warning(message: str) -> None:
    print(f"baton: warning: {message}", file=sys.stderr)


def print_named_error(error: NamedError) -> int:
    """Print an error that Baton raised; return the exit code."""
    print_error(str(error))
    return WRONG_USAGE if isinstance(error, USAGE) else FAILED


def print_no_space(error: OSError) -> int:
    """Print that the output, mostly standard output, ran out of space; return the exit code."""
    print_error(f"the output could not be written: {error.strerror}")
    # Python would flush the rest at exit and report the error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def print_usage_error(error: typer.TyperException) -> int:
    """Print a usage error of command line, environment or settings file; return the exit code."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.message, file=sys.stderr)
        return WRONG_USAGE
    context = getattr(error, "ctx", None)
    where = origin(context, getattr(error, "param", None))
    message = " ".join(error.format_message().split()).removesuffix(".")
    hint = f"; see {context.command_path} --help" if context is not None else ""
    print_error(f"{where}: {message}{hint}" if where else f"{message}{hint}")
    return error.exit_code
