"""Defaults of node options."""

from __future__ import annotations

import pytest

from engine.runner.config import RunnerConfig
from errors import InvalidConfig
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


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_tenants_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidConfig, match=r"--kv-tenant-share is .*; it must be above 0"):
        NodeOptions(RunnerConfig(model="m"), kv_tenant_share=share)
