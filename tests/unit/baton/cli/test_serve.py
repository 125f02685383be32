"""Start and end of the process of a node."""

from __future__ import annotations

import logging
import os
import socket

import pytest
import typer

from baton.cli.commands import serve
from baton.cli.commands.serve import node_command
from errors import InvalidConfig
from node.options import NodeOptions
from rpc.errors import AddressInUse


class ProcessEnded(Exception):
    """End of the process, which a test survives."""


@pytest.fixture(autouse=True)
def _test_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep signal handlers and logging of the test process, and the process itself."""

    def end(code: int) -> None:
        raise ProcessEnded(code)

    monkeypatch.setattr(serve, "_begin", lambda *_: None)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", end)


def serve_decode(*arguments: str) -> list[NodeOptions]:
    """Run the command of a decode node; return the options with which the node was started."""
    started: list[NodeOptions] = []
    app = typer.Typer()
    app.command()(node_command("decode", started.append))
    with pytest.raises(ProcessEnded, match="0"):
        app(["--model", "m", *arguments], standalone_mode=False)
    return started


def test_the_process_ends_with_its_node() -> None:
    [options] = serve_decode()

    assert options.runner.model == "m"


def test_a_busy_port_is_refused_before_the_node_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressInUse):
        serve_decode("--port", str(taken.getsockname()[1]))


def test_unavailable_cores_are_refused_before_the_node_is_loaded() -> None:
    with pytest.raises(InvalidConfig, match="--cpus 1022: not all are available"):
        serve_decode("--cpus", "1022")
