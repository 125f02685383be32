"""`baton serve router|prefill|decode`: one process of a cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from baton.cli.command import CommandGroup
from baton.cli.signatures import inherit_options
from baton.core.legs import LegKind
from baton.core.options import OUTPUT, Config, Option, build_config
from baton.imports import quick_imports
from baton.node.cpus import pin_to_cpus
from baton.node.options import NodeOptions
from baton.router.options import RouterOptions
from baton.rpc.listening import check_port, raise_descriptor_limit
from baton.rpc.process_end import end_with_parent, exit_on_sigterm
from baton.telemetry.logs import configure_logging

serve = typer.Typer(cls=CommandGroup, help="Run one process of a cluster.", no_args_is_help=True)


def node_command(role: str, run: Callable[[NodeOptions], None]) -> Callable[..., None]:
    def start(options: NodeOptions) -> None:
        check_port(options.host, options.port)  # before torch is imported
        pin_to_cpus(options.cpus)
        run(options)

    return _command(role, NodeOptions, start)


def _command(role: str, config: type[Config], run: Callable[[Config], None]) -> Callable[..., None]:
    """Return the command that runs a process with its config."""

    @inherit_options(config)
    def command(
        parent_pid: Annotated[
            int, typer.Option(hidden=True, is_eager=True, help="End when this process ends.")
        ] = 0,
        log_format: Annotated[
            str,
            Option(
                "auto, text or json; auto: text on a terminal, JSON elsewhere.",
                OUTPUT,
                is_setting=True,
            ),
        ] = "auto",
        log_level: Annotated[
            str, Option("debug, info or warning; debug also logs each successful request.", OUTPUT)
        ] = "info",
        **given: Any,
    ) -> None:
        options = build_config(config, given)
        _begin(role, parent_pid, log_format, log_level)
        run(options)
        # End the process without the half second that unloading torch takes.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)

    return command


def _run_node(kind: LegKind, options: NodeOptions) -> None:
    with quick_imports():
        from baton.node.run import run

    run(kind, options)


def _run_router(options: RouterOptions) -> None:
    with quick_imports():
        from baton.router.__main__ import main

    main(options)


serve.command(
    "prefill",
    help="Run a prefill node, which computes prompts and pushes their KV to decode nodes.",
)(node_command("prefill", partial(_run_node, LegKind.PREFILL)))
serve.command(
    "decode",
    help="Run a decode node, which receives KV from prefill nodes and generates the answers.",
)(node_command("decode", partial(_run_node, LegKind.DECODE)))
serve.command(
    "encode",
    help="Run an encode node, which encodes pictures for the nodes that compute prompts with them.",
)(node_command("encode", partial(_run_node, LegKind.ENCODE)))
serve.command(
    "router",
    help="Run the router, which clients connect to. Without --model it accepts only token ids.",
)(_command("router", RouterOptions, _run_router))


def _begin(role: str, parent_pid: int, log_format: str, log_level: str) -> None:
    exit_on_sigterm()
    if parent_pid:
        end_with_parent(parent_pid)
    configure_logging(role, log_format, log_level)
    raise_descriptor_limit()
