"""The `baton` command. Each group of commands is a module; heavy imports happen on use."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated

import typer

from baton.cli.command import (
    ENVIRONMENT_PREFIX,
    CommandGroup,
    ConfigFile,
    unwrap,
    use_command_class,
)
from baton.cli.examples import examples
from baton.cli.program import prepare, run_program
from baton.imports import quick_imports

HELP = unwrap("""
Prefill/decode-disaggregated LLM inference.

Options are read from a file (--config), the environment (BATON_UP_PORT is --port of
`baton up`) and the command line; each source overrides the ones before it.
""")
# The module of each command or group, below `commands`, in the order of the help page.
MODULES = {
    "up": "cluster",
    "demo": "cluster",
    "generate": "generate",
    "chat": "chat",
    "embed": "embed",
    "run": "run",
    "health": "health",
    "doctor": "doctor",
    "reset-prefix-cache": "reset_prefix_cache",
    "serve": "serve",
    "trace": "trace",
    "bench": "bench",
    "adapters": "adapters",
    "nodes": "nodes",
}


@cache
def make_app(names: tuple[str, ...] = tuple(MODULES)) -> typer.Typer:
    """Return the program with some of its commands. Those left out are not imported."""
    app = typer.Typer(
        name="baton",
        cls=CommandGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        callback=_baton,
        help=HELP,
        epilog=examples("baton up --model models/demo", 'baton generate "import os"'),
    )
    for name in names:
        found = getattr(
            import_module(f"baton.cli.commands.{MODULES[name]}"), name.replace("-", "_")
        )
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command()(found)
    use_command_class(app)
    return app


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print(f"baton {version('baton')}")
        raise typer.Exit


def _baton(
    config: ConfigFile = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None: ...


def names_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the commands that a command line needs: one, or all to check a settings file."""
    variables = (name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX))
    reads_settings = any("config" in text.lower() for text in (*arguments, *variables))
    is_known = bool(arguments) and arguments[0] in MODULES
    return (arguments[0],) if is_known and not reads_settings else tuple(MODULES)


def main() -> None:
    """Run the command line. A named error prints one line; a bug keeps its traceback."""
    prepare()
    with quick_imports():
        app = make_app(names_of(sys.argv[1:]))
    sys.exit(run_program(app, "baton", ENVIRONMENT_PREFIX))
