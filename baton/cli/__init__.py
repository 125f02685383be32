"""The `baton` command. Each group of commands is a module; heavy imports happen on use."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from baton.cli.bench import bench
from baton.cli.chat import chat
from baton.cli.cluster import demo, up
from baton.cli.command import (
    ENVIRONMENT_PREFIX,
    ConfigFile,
    hide_variables,
    unwrap,
    use_command_class,
)
from baton.cli.doctor import doctor
from baton.cli.errors import NAMED, print_named_error, print_no_space, print_usage_error
from baton.cli.examples import examples
from baton.cli.generate import generate
from baton.cli.health import health
from baton.cli.nodes import nodes
from baton.cli.reset_prefix_cache import reset_prefix_cache
from baton.cli.run import run
from baton.cli.serve import serve
from baton.cli.trace import trace
from baton.encoding import defer_stdin_errors

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"baton {version('baton')}")
        raise typer.Exit


@app.callback(
    help=unwrap("""
    Prefill/decode-disaggregated LLM inference.

    Options are read from a file (--config), the environment (BATON_UP_PORT is --port of
    `baton up`) and the command line; each source overrides the ones before it.
    """),
    epilog=examples("baton up --model models/demo", 'baton generate "import os"'),
)
def _baton(
    config: ConfigFile = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None: ...


for command in (up, demo, generate, chat, nodes, run, health, doctor, reset_prefix_cache):
    app.command()(command)
app.add_typer(serve, name="serve")
app.add_typer(trace, name="trace")
app.add_typer(bench, name="bench")
use_command_class(app)


def main() -> None:
    """Run the command line. A named error prints one line; a bug keeps its traceback."""
    prepare()
    sys.exit(_run())


def prepare() -> None:
    """Set the process environment that torch and gRPC read when they are loaded."""
    # Idle torch threads must not spin on a core that another process could use. With two
    # processes on two cores, spinning slows both several times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # With the event engine, each message that a gRPC client reads crosses four threads, which
    # takes half of the router's CPU time per token. Use the older polling loop (ADR 0015).
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")
    # gRPC writes each failed handshake to standard error; Baton logs them itself.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    defer_stdin_errors()


def _run() -> int:
    command = typer.main.get_command(app)
    hide_variables(command)
    try:
        code = command.main(
            prog_name="baton", standalone_mode=False, auto_envvar_prefix=ENVIRONMENT_PREFIX
        )
    except NAMED as error:
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
