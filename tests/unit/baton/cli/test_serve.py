"""Start and end of the process of a node."""

from __future__ import annotations

import logging
import os
import socket

import pytest
import typer

from baton.cli.commands import serve
from baton.cli.commands.cluster import up
from baton.cli.commands.serve import node_command
from baton.core.errors import InvalidConfig
from baton.node.kv.events.config import KvEventsConfig
from baton.node.options import NodeOptions
from baton.rpc.errors import AddressInUse


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


def test_the_serve_process_exits_with_its_node() -> None:
    [options] = serve_decode()

    assert options.runner.model == "m"


def test_a_busy_port_is_refused_before_the_node_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressInUse):
        serve_decode("--port", str(taken.getsockname()[1]))


def test_unavailable_cores_are_refused_before_the_node_is_loaded() -> None:
    with pytest.raises(InvalidConfig, match="--cpus 1022: not all are available"):
        serve_decode("--cpus", "1022")


def test_kv_events_and_connectors_are_set_by_options() -> None:
    [options] = serve_decode(
        *("--kv-events-endpoint", "tcp://*:5557", "--kv-events-topic", "kv@{node_id}@m"),
        *("--kv-connector", "shelf", "--kv-connector-config", '{"max_blocks": 7}'),
    )
    [tiers] = serve_decode("--kv-host-memory", "1MiB", "--kv-folder", "/kv")

    assert options.kv_events == KvEventsConfig("tcp://*:5557", topic="kv@{node_id}@m")
    chosen = options.chosen_connector
    assert chosen is not None
    assert (chosen.name, chosen.config) == ("shelf", {"max_blocks": 7})
    assert not tiers.kv_events.is_on
    assert tiers.chosen_connector is not None
    assert tiers.chosen_connector.name == "tiers"
    assert tiers.chosen_connector.config["host_bytes"] == 1 << 20
    assert tiers.chosen_connector.config["folder"] == "/kv"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--kv-events-replay-endpoint", "tcp://*:1"], "needs --kv-events-endpoint"),
        (["--kv-events-endpoint", "tcp://*:1", "--no-prefix-caching"], "prefix-caching"),
        (["--kv-connector", "a", "--kv-host-memory", "1MiB"], "leave out"),
        (["--kv-connector-config", '{"a": 1}'], "needs --kv-connector"),
        (["--kv-connector", "a", "--kv-connector-config", "{"], "is not JSON"),
        (["--kv-connector", "a", "--kv-connector-config", "[1]"], "must be a JSON object"),
    ],
)
def test_incompatible_options_are_refused(arguments: list[str], word: str) -> None:
    app = typer.Typer()
    app.command()(node_command("decode", lambda _: None))

    with pytest.raises(InvalidConfig, match=word):
        app(["--model", "m", *arguments], standalone_mode=False)


def test_several_nodes_cannot_share_a_kv_event_endpoint() -> None:
    app = typer.Typer()
    app.command()(up)

    with pytest.raises(InvalidConfig, match="cannot be shared by several nodes"):
        app(["--kv-events-endpoint", "tcp://*:5557"], standalone_mode=False)


def test_a_single_node_may_have_a_fixed_kv_event_endpoint() -> None:
    app = typer.Typer()
    app.command()(up)
    options = ("--kv-events-endpoint", "tcp://*:5557", "--kv-events-replay-endpoint", "tcp://*:58")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--prefill", "0", "--port", str(taken.getsockname()[1]), *options]
        with pytest.raises(AddressInUse):
            app(arguments, standalone_mode=False)
