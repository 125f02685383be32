"""Consistency of docker-compose.yml with command line, image and settings page."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_lines import complaint_about, option
from tests.support.yaml_files import parse_yaml, read_yaml

ROOT = Path(__file__).parents[3]
COMPOSE = ROOT / "docker-compose.yml"
# An innermost ${NAME:-default} or ${NAME-default}.
VARIABLE = re.compile(r"\$\{(\w+):?-([^${}]*)\}")


def with_defaults(text: str) -> str:
    """Substitute the defaults, as Compose does when no variable is set."""
    while VARIABLE.search(text):
        text = VARIABLE.sub(r"\2", text)
    return text


@cache
def services() -> dict[str, dict[str, Any]]:
    """Return the services, each merged with the one that it extends."""
    [document] = parse_yaml(with_defaults(COMPOSE.read_text()))
    found: dict[str, dict[str, Any]] = document["services"]
    bases = {
        name: found[one["extends"]["service"]] for name, one in found.items() if "extends" in one
    }
    return {name: bases.get(name, {}) | one for name, one in found.items()}


def with_tls() -> dict[str, dict[str, Any]]:
    """Merge deploy/compose.tls.yaml into the services, as Compose does."""
    text = with_defaults((ROOT / "deploy/compose.tls.yaml").read_text())
    [document] = parse_yaml(text)
    added = document["services"]
    return {
        name: one
        | {
            "environment": one["environment"] | added[name]["environment"],
            "volumes": [*one["volumes"], *added[name]["volumes"]],
        }
        for name, one in of_baton().items()
    }


def with_ranks() -> dict[str, dict[str, Any]]:
    """Merge deploy/compose.ranks.yaml into the services that it names, as Compose does."""
    text = with_defaults((ROOT / "deploy/compose.ranks.yaml").read_text())
    [document] = parse_yaml(text)
    return {
        name: services()[name]
        | {"environment": services()[name]["environment"] | added["environment"]}
        for name, added in document["services"].items()
    }


def of_baton() -> dict[str, dict[str, Any]]:
    return {name: one for name, one in services().items() if one["image"].startswith("baton")}


@pytest.mark.parametrize("name", of_baton())
def test_every_process_is_started_with_options_that_exist(name: str) -> None:
    service = of_baton()[name]

    assert not complaint_about(service["command"], service["environment"])


@pytest.mark.parametrize("name", of_baton())
def test_with_tls_every_process_and_its_probe_use_the_certificates(name: str) -> None:
    service = with_tls()[name]
    role = service["command"][1]
    [folder] = {one["target"] for one in service["volumes"] if isinstance(one, dict)}
    files = {Path(one) for one in service["environment"].values() if str(one).startswith("/")}

    assert not complaint_about(service["command"], service["environment"])
    assert not complaint_about(service["healthcheck"]["test"][2:], service["environment"])
    assert {str(file.parent) for file in files} == {folder}
    owner = "router" if role == "router" else "node"
    assert {file.name for file in files} == {f"{owner}.crt", f"{owner}.key", "ca.crt"}
    asks_for_certificates = f"BATON_SERVE_{role.upper()}_TLS_CLIENT_CA" in service["environment"]
    assert asks_for_certificates == (role != "router")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nodes_can_have_several_processes(role: str) -> None:
    service = with_ranks()[role]

    assert not complaint_about(service["command"], service["environment"])
    assert service["environment"][f"BATON_SERVE_{role.upper()}_TENSOR_PARALLEL_SIZE"] == "2"


@pytest.mark.parametrize("name", of_baton())
def test_every_probe_uses_the_listening_port(name: str) -> None:
    service = of_baton()[name]
    port = option(service["command"], "port")

    assert option(service["command"], "host") == "0.0.0.0"
    assert service["healthcheck"]["test"] == ["CMD", "baton", "health", f"127.0.0.1:{port}"]


@pytest.mark.parametrize("name", of_baton())
def test_the_stop_grace_period_exceeds_the_drain_timeout(name: str) -> None:
    service = of_baton()[name]

    given_s = float(service["stop_grace_period"].removesuffix("s"))
    assert given_s > float(option(service["command"], "drain-timeout-s"))


@pytest.mark.parametrize("router", ["router", "router-gpu"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_router_discovers_the_nodes_and_stops_before_them(router: str, role: str) -> None:
    found = of_baton()
    name, port = option(found[router]["command"], f"{role}-nodes").split("dns:///")[1].split(":")

    assert found[name]["command"][:2] == ["serve", role]
    assert option(found[name]["command"], "port") == port
    assert name in found[router]["depends_on"]
    assert found[name].get("profiles") == found[router].get("profiles")


def test_the_router_discovers_encode_nodes_if_a_variable_names_them() -> None:
    found, page = of_baton(), (ROOT / "docs/deploy.md").read_text()
    assert option(found["router"]["command"], "encode-nodes") == ""
    for text in (page, COMPOSE.read_text()):
        [source] = set(re.findall(r"BATON_ENCODE_NODES=(\S+)", text))
        name, port = source.removeprefix("dns:///").split(":")
        assert found[name]["command"][:2] == ["serve", "encode"]
        assert option(found[name]["command"], "port") == port


def test_an_encode_node_keeps_kv_as_prefill_nodes_do() -> None:
    found = of_baton()

    for name in ("model", "kv-transport", "kv-tls", "kv-net-device"):
        assert option(found["encode"]["command"], name) == option(found["prefill"]["command"], name)


def test_every_image_is_built_by_one_service_alone() -> None:
    built = [one["image"] for one in of_baton().values() if "build" in one]

    assert sorted(built) == sorted({one["image"] for one in of_baton().values()})


def test_the_settings_page_documents_every_variable() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    variables = {name for name, _ in re.findall(r"\$\{(\w+)(:?-)", COMPOSE.read_text())}

    assert {name for name in variables if name not in page} == set()


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [one for service in services().values() for one in service.get("volumes", [])]
    sources = {one.split(":")[0] for one in mounts if one.startswith(".")}

    assert sources
    assert {source for source in sources if not (ROOT / source).exists()} == set()


def test_the_collector_sends_traces_to_a_service_that_exists() -> None:
    collector = read_yaml(ROOT / "deploy/collector.yaml")
    known = collector["receivers"] | collector["processors"] | collector["exporters"]

    assert collector["exporters"]["otlp_grpc"]["endpoint"].split(":")[0] in services()
    for pipeline in collector["service"]["pipelines"].values():
        assert {part for parts in pipeline.values() for part in parts} <= set(known)


def test_the_image_has_every_package_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }

    assert packages - let_in == set()


def test_other_extras_do_not_fetch_torch_again() -> None:
    """A build argument is part of the cache key of every step below its ARG."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()

    [torch] = [number for number, line in enumerate(lines) if '"${TORCH}"' in line]
    [extras] = [number for number, line in enumerate(lines) if line == "ARG EXTRAS"]
    assert torch < extras


def test_the_settings_page_stops_services_of_every_profile() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    profiles = {profile for one in services().values() for profile in one.get("profiles", ())}

    assert "docker compose --profile '*' down" in page
    assert {profile for profile in profiles if f"`{profile}`" not in page} == set()


def test_optional_variables_are_documented_as_optional() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    [row] = [line for line in page.splitlines() if "`BATON_TORCH_INDEX`" in line]

    assert "BATON_TORCH_INDEX-" in COMPOSE.read_text()  # and not :-, which would refill it
    assert "`BATON_TORCH_INDEX=`" in row


def test_image_and_installer_use_the_same_torch() -> None:
    reported = re.findall(r"torch==[\w.+]+", (ROOT / "Dockerfile").read_text())
    installed = re.findall(r"torch==[\w.+]+", (ROOT / "tools/install.sh").read_text())
    composed = re.findall(r"torch==[\w.+]+", COMPOSE.read_text())

    assert (
        set(reported) == set(installed) == set(composed) == {"torch==2.13.0", "torch==2.13.0+cpu"}
    )


@pytest.mark.skipif(not shutil.which("docker"), reason="docker is not installed")
def test_docker_compose_accepts_the_file() -> None:
    has_compose = subprocess.run(["docker", "compose", "version"], capture_output=True)
    if has_compose.returncode:
        pytest.skip("docker has no compose plugin")
    requested = [
        "docker",
        "compose",
        "--profile",
        "*",
        "config",
        "--quiet",
    ]

    ended = subprocess.run(requested, cwd=ROOT, capture_output=True, text=True)

    assert (ended.returncode, ended.stderr) == (0, "")
