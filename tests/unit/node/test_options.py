"""Defaults of node options."""

from __future__ import annotations

import pytest

from engine.runner.config import RunnerConfig
from node.options import NodeOptions


@pytest.mark.parametrize(
    ("host", "given", "device"),
    [
        ("127.0.0.1", "", "lo"),
        ("::1", "", "lo"),
        ("[::1]", "", "lo"),
        ("localhost", "", "lo"),
        ("0.0.0.0", "", ""),
        ("10.0.0.7", "", ""),
        ("node.example", "", ""),
        ("127.0.0.1", "eth0", "eth0"),
    ],
)
def test_ucx_keeps_to_the_loopback_where_the_node_does(host: str, given: str, device: str) -> None:
    options = NodeOptions(RunnerConfig(model="m"), host=host, kv_net_device=given)

    assert options.kv_device == device
