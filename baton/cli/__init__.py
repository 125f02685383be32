"""The `baton` command. Each group of commands is a module; heavy imports happen on use."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.cli.command import (
    ENVIRONMENT_PREFIX,
    CommandGroup,
    ConfigFile,
    unwrap,
    use_command_class,
)
from baton.cli.commands.adapters import adapters
from baton.cli.commands.bench import bench
from baton.cli.commands.chat import chat
from baton.cli.commands.cluster import demo, up
from baton.cli.commands.doctor import doctor
from baton.cli.commands.embed import embed
from baton.cli.commands.generate import generate
from baton.cli.commands.health import health
from baton.cli.commands.nodes import nodes
from baton.cli.commands.reset_prefix_cache import reset_prefix_cache
from baton.cli.commands.run import run
from baton.cli.commands.serve import serve
from baton.cli.commands.trace import trace
from baton.cli.examples import examples
from baton.cli.program import prepare, run_program

app = typer.Typer(
    name="baton",
    cls=CommandGroup,
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


for command in (up, demo, generate, chat, embed, run, health, doctor, reset_prefix_cache):
    app.command()(command)
app.add_typer(serve, name="serve")
app.add_typer(trace, name="trace")
app.add_typer(bench, name="bench")
app.add_typer(adapters, name="adapters")
app.add_typer(nodes, name="nodes")
use_command_class(app)


def main() -> None:
    """Run the command line. A named error prints one line; a bug keeps its traceback."""
    prepare()
    sys.exit(run_program(app, "baton", ENVIRONMENT_PREFIX))
