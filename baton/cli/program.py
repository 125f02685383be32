"""Run of a command line: process environment, and named errors as one line."""

from __future__ import annotations

import errno
import os
import sys
from functools import cache
from typing import Any

import typer

from baton.cli.command import hide_variables
from baton.cli.errors import (
    FAILED,
    print_error,
    print_named_error,
    print_no_space,
    print_usage_error,
)
from baton.core.errors import NamedError
from baton.encoding import defer_stdin_errors

STANDARD_INPUT, STANDARD_ERROR = 0, 2


def prepare() -> None:
    """Set the process environment that torch and gRPC read when they are loaded."""
    # Idle torch threads must not spin on a core that another process could use. With two
    # processes on two cores, spinning slows both several times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # With the event engine, each message that a gRPC client reads crosses four threads, which
    # takes half of the router's CPU time per token. Use the older polling loop.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
    # gRPC writes each failed handshake to standard error; Baton logs them itself.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    _check_standard_streams()
    defer_stdin_errors()


def _check_standard_streams() -> None:
    """Open what is closed of standard input and error, and exit if standard output is closed.

    A file or connection that got the number of a closed stream would receive its texts.
    """
    is_closed = sys.stdin is None, sys.stdout is None, sys.stderr is None
    if not any(is_closed):
        return
    while (unused := os.open(os.devnull, os.O_RDWR)) <= STANDARD_ERROR:
        pass
    os.close(unused)
    sys.stdin = sys.stdin or open(STANDARD_INPUT)  # noqa: SIM115 - for the process's whole life
    sys.stderr = sys.stderr or open(STANDARD_ERROR, "w")  # noqa: SIM115
    if sys.stdout is None:
        print_error("standard output is closed; redirect it, such as to /dev/null")
        sys.exit(FAILED)


@cache
def command_of(app: typer.Typer) -> Any:
    """Build the command of an app, with all of its subcommands."""
    command = typer.main.get_command(app)
    hide_variables(command)
    return command


def run_program(app: typer.Typer, name: str, variable_prefix: str) -> int:
    """Run a command line; return its exit code. A bug keeps its traceback."""
    try:
        code = command_of(app).main(
            prog_name=name, standalone_mode=False, auto_envvar_prefix=variable_prefix
        )
    except NamedError as error:
        return print_named_error(error)
    except typer.TyperException as error:
        return print_usage_error(error)
    except typer.Abort:
        return 130
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return print_no_space(error)
    return code if isinstance(code, int) else 0
