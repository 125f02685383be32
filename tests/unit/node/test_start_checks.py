"""Checks of a node before it loads a model. In these tests, there is no model to load."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import InvalidConfig, ModelError, NamedError
from baton.core.legs import LegKind
from baton.engine.runner.config import RunnerConfig
from baton.node.adapters.config import AdapterConfig, AdapterFolder
from baton.node.kv.events.config import KvEventsConfig
from baton.node.kv.tiers_config import TiersConfig
from baton.node.options import NodeOptions
from baton.node.run import run
from baton.rpc.errors import AddressInUse
from baton.telemetry.options import TelemetryOptions
from tests.support.encoders import make_encoder

HOST_BYTES = 1 << 20


def start(folder: Path, **settings: Any) -> None:
    """Start a node whose model folder is empty."""
    folder.mkdir(exist_ok=True)
    run(LegKind.DECODE, NodeOptions(RunnerConfig(str(folder)), **settings))


@pytest.fixture
def port() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def assert_refused(
    folder: Path, error: type[NamedError], match: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        start(folder, **settings)


def test_a_kv_folder_writable_by_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    settings = {"tiers": TiersConfig(HOST_BYTES, str(tmp_path / "kv"))}

    assert_refused(tmp_path / "model", InvalidConfig, r"--kv-folder .*; chmod go-w", settings)


def test_an_unusable_kv_folder_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = {"tiers": TiersConfig(HOST_BYTES, str(tmp_path / "file" / "kv"))}

    assert_refused(tmp_path / "model", ModelError, "config.json", settings)


def test_an_object_store_without_a_url_is_refused(tmp_path: Path) -> None:
    settings = {"tiers": TiersConfig(HOST_BYTES, object_store="bucket")}

    assert_refused(tmp_path / "model", InvalidConfig, "--kv-object-store bucket: give it", settings)


def test_a_connector_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    settings = {"kv_connector": "none-such"}

    assert_refused(tmp_path / "model", InvalidConfig, "--kv-connector none-such", settings)


def test_settings_unknown_to_the_tiers_are_refused(tmp_path: Path) -> None:
    settings = {"kv_connector": "tiers", "kv_connector_config": {"riddle": 1}}

    assert_refused(tmp_path / "model", InvalidConfig, "kv-connector-config.*riddle", settings)


def test_a_metrics_port_in_use_is_refused(tmp_path: Path, port: int) -> None:
    settings = {"telemetry": TelemetryOptions(metrics_port=port)}

    assert_refused(tmp_path / "model", AddressInUse, "choose another --metrics-port", settings)


def test_a_kv_event_endpoint_in_use_is_refused(tmp_path: Path, port: int) -> None:
    settings = {"kv_events": KvEventsConfig(f"tcp://*:{port}")}

    assert_refused(tmp_path / "model", InvalidConfig, "--kv-events-endpoint.*in use", settings)


def test_a_replay_endpoint_in_use_is_refused(tmp_path: Path, port: int) -> None:
    settings = {"kv_events": KvEventsConfig("tcp://*:0", f"tcp://127.0.0.1:{port}")}

    assert_refused(tmp_path / "model", InvalidConfig, "kv-events-replay-endpoint", settings)


def test_a_kv_event_endpoint_without_a_port_is_refused(tmp_path: Path) -> None:
    settings = {"kv_events": KvEventsConfig("tcp://router")}

    assert_refused(tmp_path / "model", InvalidConfig, "--kv-events-endpoint tcp://router", settings)


def test_valid_settings_pass_the_checks_up_to_the_model(tmp_path: Path) -> None:
    settings = {
        "tiers": TiersConfig(HOST_BYTES, str(tmp_path / "kv" / "files")),
        "telemetry": TelemetryOptions(metrics_port=0),
        "kv_events": KvEventsConfig("tcp://*:0"),
    }

    assert_refused(tmp_path / "model", ModelError, r"config\.json is missing", settings)
    assert not list((tmp_path / "kv" / "files").iterdir())


def test_an_adapter_that_cannot_be_read_is_refused_before_the_model(tmp_path: Path) -> None:
    settings = {"adapters": AdapterConfig((AdapterFolder("sql", tmp_path / "nothing"),))}

    assert_refused(tmp_path / "model", ModelError, "nothing/adapter_config.json", settings)


def test_adapters_of_an_encoder_are_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path / "bert", "bert")
    options = NodeOptions(
        RunnerConfig(str(tmp_path / "bert")), adapters=AdapterConfig(root=tmp_path)
    )

    with pytest.raises(InvalidConfig, match="--lora and --lora-root cannot be used"):
        run(LegKind.PREFILL, options)
