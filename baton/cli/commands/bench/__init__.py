"""`baton bench`: measurements, as tables for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

import typer

from baton.cli.command import Group, unwrap
from baton.cli.commands.bench.engine import engine
from baton.cli.commands.bench.kv import kv
from baton.cli.commands.bench.replay import replay
from baton.cli.commands.bench.serve import serve
from baton.rpc.process_end import exit_on_sigterm


class BenchGroup(Group):
    """Group whose refusal of an unknown command names the benchmarks of the repository."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            error.message += " Research benchmarks run from a checkout: python -m benchmarks NAME."
            raise


bench = typer.Typer(cls=BenchGroup, no_args_is_help=True)
for command in (serve, replay, engine, kv):
    bench.command()(command)


@bench.callback(
    help=unwrap("""
    Measure a running cluster, the engine or the KV transfer.

    Research benchmarks, also against other engines, run from a checkout of the repository as
    `python -m benchmarks NAME`.
    """)
)
def _bench() -> None:
    exit_on_sigterm()  # unwinds the stack, so that started processes end with the measurement
