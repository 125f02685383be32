"""Defaults of node options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import InvalidConfig
from baton.core.options import build_config
from baton.engine.runner.config import RunnerConfig
from baton.node.adapters.config import AdapterConfig
from baton.node.kv.tiers_config import TiersConfig
from baton.node.options import NodeOptions


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
def test_ucx_is_limited_to_loopback_if_the_node_listens_there(
    host: str, given: str, device: str
) -> None:
    options = NodeOptions(RunnerConfig(model="m"), host=host, kv_net_device=given)

    assert options.kv_device == device


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_an_invalid_tenant_share_is_refused(share: float) -> None:
    with pytest.raises(InvalidConfig, match=r"kv-tenant-share is .*; it must be above 0"):
        TiersConfig(tenant_share=share)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"tiers": TiersConfig(1)}, "--kv-host-memory cannot be used with prefix-caching = false"),
        ({"kv_connector": "a"}, "--kv-connector cannot be used with prefix-caching = false"),
    ],
)
def test_kv_tiers_require_prefix_caching(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidConfig, match=named):
        NodeOptions(RunnerConfig(model="m"), enable_prefix_caching=False, **settings)


def test_kv_is_kept_in_host_memory_by_default() -> None:
    def has_tiers(device: str = "cpu", **settings: Any) -> bool:
        options = NodeOptions(RunnerConfig(model="m", device=device), **settings)
        return options.chosen_connector is not None and options.chosen_connector.name == "tiers"

    assert has_tiers()
    assert has_tiers(tiers=TiersConfig(folder="/kv"))
    assert not has_tiers(tiers=TiersConfig(0))
    assert not has_tiers(enable_prefix_caching=False)
    assert not has_tiers(kv_connector="shelf")
    assert not has_tiers("cuda")  # it would be pinned at the start


@pytest.mark.parametrize("named", ["folder", "object_store"])
def test_files_and_objects_need_host_memory(named: str) -> None:
    files: dict[str, Any] = {named: "s3://bucket"}
    with pytest.raises(InvalidConfig, match="needs --kv-host-memory"):
        NodeOptions(RunnerConfig("m", device="cuda"), tiers=TiersConfig(**files))
    with pytest.raises(InvalidConfig, match="needs --kv-host-memory"):
        TiersConfig(0, **files)


def test_nodes_with_gpus_have_kv_tiers() -> None:
    options = NodeOptions(RunnerConfig(model="m", device="cuda"), tiers=TiersConfig(1))

    assert options.chosen_connector is not None


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--kv-transport 'pigeon': choose one of nixl, ucxx"):
        NodeOptions(RunnerConfig(model="m"), kv_transport="pigeon")


def parse(*adapters: str, **given: Any) -> AdapterConfig:
    return build_config(AdapterConfig, {"lora": adapters, **given})


def test_adapters_are_off_unless_a_folder_is_named() -> None:
    assert not parse(max_loras=4).are_served
    assert NodeOptions(RunnerConfig("m")).runner_config.max_loras == 0
    for adapters in (AdapterConfig(root=Path("a")), parse("sql=folder")):
        options = NodeOptions(RunnerConfig("m"), adapters=adapters)
        assert options.runner_config.max_loras == 8


def test_adapters_are_named_folders() -> None:
    config = parse("a=b", "c=/d=e", max_loras=2, max_lora_rank=16)

    assert config.adapters == (("a", Path("b")), ("c", Path("/d=e")))
    assert config.num_places == 8
    runner = NodeOptions(RunnerConfig("m"), adapters=config).runner_config
    assert (runner.max_loras, runner.max_lora_rank, runner.num_adapter_places) == (2, 16, 8)


@pytest.mark.parametrize(
    ("adapters", "settings", "match"),
    [
        (("folder",), {}, "write NAME=FOLDER"),
        (("a=",), {}, "write NAME=FOLDER"),
        (("=a",), {}, "1 to 256 printable"),
        (("a=b", "a=c"), {}, "--lora is given twice for a"),
        ((), {"max_loras": 4, "max_cpu_loras": 3}, "max-cpu-loras is 3; it must be at least"),
        ((), {"max_loras": 0}, "max-loras is 0"),
    ],
)
def test_bad_settings_of_adapters_are_refused(
    adapters: tuple[str, ...], settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidConfig, match=match):
        parse(*adapters, **settings)
