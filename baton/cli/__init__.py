"""The `baton` command. Each group of commands has its file; what they need is loaded late."""

from __future__ import annotations

import os
import sys

import typer

from baton.cli.bench import bench
from baton.cli.cluster import demo, up
from baton.cli.generate import generate
from baton.cli.run import run
from baton.cli.serve import serve
from engine.errors import EngineError
from kv_transfer.errors import KvTransferError
from serving.errors import ServiceError

NAMED = (EngineError, KvTransferError, ServiceError)

app = typer.Typer(
    name="baton",
    help="Prefill/decode-disaggregated LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up)
app.command()(demo)
app.command()(generate)
app.command()(run)
app.add_typer(serve, name="serve")
app.add_typer(bench, name="bench")


def main() -> None:
    """A named error is one line and exit code 2; a bug keeps its traceback."""
    # Before torch is loaded: its idle threads must not spin on a core that another process
    # could use. With two processes on two cores, spinning costs a factor, not a percentage.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except NAMED as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(2)
