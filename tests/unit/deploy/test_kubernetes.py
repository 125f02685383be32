"""Manifests of deploy/kubernetes: valid by schema, consistent with command line and image."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from baton.router.options import RouterOptions
from baton.rpc.health import LIVENESS
from baton.rpc.process_end import DRAIN_TIMEOUT_S
from tests.support import manifests
from tests.support.command_lines import complaint_about, option
from tests.support.manifests import (
    NODES,
    OVERLAYS,
    Manifest,
    container,
    find,
    pod,
    render_with,
    rendered,
    workload,
    written,
)
from tests.support.yaml_files import read_yaml

# The oldest that knows every field here without a feature gate, and the newest with a schema.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
COMPONENTS = ("router", *NODES)
REPOSITORY = Path(__file__).parents[3]
FIND_EVERY_S = inspect.signature(RouterOptions).parameters["find_every_s"].default
SERVICES_HEAR_WITHIN_S = 5  # until proxies and DNS have removed a terminating pod
SETTINGS = sorted(manifests.ROOT.rglob("baton.toml"))


def name_of(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def labels_match(selector: Any, component: str) -> bool:
    wanted = selector.get("matchLabels", selector).items()
    return bool(wanted <= pod(component)["metadata"]["labels"].items())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", written(), ids=name_of)
def test_every_manifest_is_valid(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_renders_to_valid_manifests(overlay: str) -> None:
    found = rendered(overlay)

    for manifest in found:
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    names = {name_of(one) for one in found}
    assert names >= {name_of(one) for one in written(manifests.ROOT / "base")}
    assert [one["kind"] for one in found if "data" in one] == ["ConfigMap"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_mount_of_an_overlay_has_its_volume(overlay: str) -> None:
    for manifest in rendered(overlay):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            spec = manifest["spec"]
            claims = {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", [])}
            volumes = {one["name"] for one in spec["template"]["spec"]["volumes"]} | claims
            [runs] = spec["template"]["spec"]["containers"]
            assert {mount["name"] for mount in runs["volumeMounts"]} == volumes


def test_every_file_is_listed_and_every_listed_file_exists() -> None:
    listed = {path for one in manifests.kustomizations() for path in manifests.listed(one)}
    there = {
        path
        for path in manifests.ROOT.rglob("*")
        if path.is_file() and path.name != "kustomization.yaml"
    }

    assert {path for path in listed if path.is_file()} == there
    folders = {path for path in listed if not path.is_file()}
    assert all((folder / "kustomization.yaml").exists() for folder in folders)


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda path: path.parent.name)
def test_every_process_is_started_with_options_that_exist(component: str, settings: Path) -> None:
    args = container(component)["args"]
    mount = next(one for one in container(component)["volumeMounts"] if one["name"] == "settings")
    assert args[0] == f"--config={mount['mountPath']}/{settings.name}"

    assert not complaint_about([f"--config={settings}", *args[1:]])


def pods_of(found: list[Manifest]) -> dict[str, Manifest]:
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in found
        if one["kind"] in ("Deployment", "StatefulSet")
    }


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Pods with components/tls by process, encode nodes included."""
    return pods_of(render_with(tmp_path_factory.mktemp("tls"), "cpu-vision", "tls"))


def test_the_overlay_with_tls_secures_its_processes(secured: dict[str, Manifest]) -> None:
    for name, spec in pods_of(rendered("cpu-demo-tls")).items():
        assert spec["containers"][0]["env"] == secured[name]["containers"][0]["env"]
        assert spec["volumes"][-1] == secured[name]["volumes"][-1]


@pytest.mark.parametrize("component", COMPONENTS)
def test_with_tls_each_process_mounts_its_certificate_secret(
    component: str, secured: dict[str, Manifest]
) -> None:
    spec = secured[component]
    [runs] = spec["containers"]
    environment = {one["name"]: one.get("value", "") for one in runs["env"]}
    mounts = {one["mountPath"]: one["name"] for one in runs["volumeMounts"]}
    volumes = {one["name"]: one for one in spec["volumes"]}

    settings = manifests.ROOT / "overlays/cpu-demo/baton.toml"
    assert not complaint_about([f"--config={settings}", *runs["args"][1:]], environment)
    files = {value for value in environment.values() if value.startswith("/")}
    assert {Path(file).name for file in files} == {"tls.crt", "tls.key", "ca.crt"}
    [folder] = {str(Path(file).parent) for file in files}
    secret = volumes[mounts[folder]]["secret"]
    assert secret == {
        "secretName": f"{'router' if component == 'router' else 'node'}-tls",
        "defaultMode": 0o440,
    }
    asks_for_certificates = f"BATON_SERVE_{component.upper()}_TLS_CLIENT_CA" in environment
    assert asks_for_certificates == (component in NODES)


@pytest.mark.parametrize("component", COMPONENTS)
def test_with_tls_probes_run_the_equivalent_health_command(
    component: str, secured: dict[str, Manifest]
) -> None:
    [runs] = secured[component]["containers"]
    environment = {one["name"]: one.get("value", "") for one in runs["env"]}

    for kind in ("startup", "readiness", "liveness"):
        plain, probe = container(component)[f"{kind}Probe"], runs[f"{kind}Probe"]
        program, *arguments = probe["exec"]["command"]
        assert "grpc" not in probe
        assert (program, arguments[0]) == ("baton", "health")
        assert f"127.0.0.1:{plain['grpc']['port']}" in arguments
        assert ("--live" in arguments) == (plain["grpc"].get("service") == LIVENESS)
        assert probe["timeoutSeconds"] > float(option(arguments, "timeout"))
        assert not complaint_about(arguments, environment)


@pytest.mark.parametrize("component", COMPONENTS)
def test_probes_and_services_use_the_listening_port(component: str) -> None:
    runs = container(component)
    port = int(option(runs["args"], "port"))
    probes = [runs[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")]
    [served] = find("Service", component)["spec"]["ports"]

    assert runs["ports"][0]["containerPort"] == port
    assert [probe["port"] for probe in probes] == [port] * 3
    assert [probe.get("service") for probe in probes] == [LIVENESS, None, LIVENESS]
    assert (served["port"], served["targetPort"]) == (port, runs["ports"][0]["name"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda path: path.parent.name)
def test_the_router_discovers_nodes_by_their_headless_service(role: str, settings: Path) -> None:
    assert_finds(role, tomllib.loads(settings.read_text())["serve"]["router"][f"{role}-nodes"])


def test_the_router_discovers_encode_nodes_if_there_are_any() -> None:
    [router] = pods_of(rendered("cpu-vision"))["router"]["containers"]
    [without] = pods_of(rendered("cpu-demo"))["router"]["containers"]

    assert_finds("encode", option(router["args"], "encode-nodes"))
    assert router["args"][:-1] == without["args"]


def assert_finds(role: str, source: str) -> None:
    name, port = source.removeprefix("dns:///").split(":")
    service = find("Service", name)["spec"]

    assert service["clusterIP"] == "None"
    assert labels_match(service["selector"], role)
    assert int(port) == service["ports"][0]["port"]
    assert workload(role)["spec"]["serviceName"] == name


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_selector_matches_its_pods_only(component: str) -> None:
    selectors = [
        workload(component)["spec"]["selector"],
        find("Service", component)["spec"]["selector"],
        find("PodDisruptionBudget", component)["spec"]["selector"],
        find("NetworkPolicy", component)["spec"]["podSelector"],
    ]

    for selector in selectors:
        assert [one for one in COMPONENTS if labels_match(selector, one)] == [component]


def test_network_policies_allow_the_connections_that_are_made() -> None:
    dialled_by = {
        component: {
            dialler
            for rule in find("NetworkPolicy", component)["spec"]["ingress"]
            for peer in rule.get("from", [])
            for dialler in COMPONENTS
            if labels_match(peer["podSelector"], dialler)
        }
        for component in NODES
    }

    assert dialled_by == {
        "prefill": {"router", *NODES},
        "decode": {"router", *NODES},
        "encode": {"router", "prefill", "decode"},
    }


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda path: path.parent.name)
def test_network_policies_allow_the_metrics_ports(component: str, settings: Path) -> None:
    serve = tomllib.loads(settings.read_text())["serve"]
    port = serve["metrics-port"]
    assert serve["metrics-host"] == "0.0.0.0"
    rules = find("NetworkPolicy", component)["spec"]["ingress"]

    assert {"name": "metrics", "containerPort": port} in container(component)["ports"]
    assert {"ports": [{"port": port}]} in rules


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_autoscalers_use_an_existing_node_metric(role: str) -> None:
    [metric] = find("HorizontalPodAutoscaler", role)["spec"]["metrics"]
    names = (REPOSITORY / "telemetry/metrics/names.py").read_text().replace(".", "_")

    assert f'"{metric["pods"]["metric"]["name"]}"' in names


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_autoscaler_scales_the_deployment_of_its_name(role: str) -> None:
    target = find("HorizontalPodAutoscaler", role)["spec"]["scaleTargetRef"]

    assert (target["kind"], target["name"]) == ("StatefulSet", role)


@pytest.mark.parametrize("component", COMPONENTS)
def test_pods_run_as_the_image_user_with_writable_volumes(component: str) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    runs, security = container(component), pod(component)["spec"]["securityContext"]
    [cache] = [one["mountPath"] for one in runs["volumeMounts"] if one["name"] == "cache"]

    assert f"USER {security['runAsUser']}:{security['runAsGroup']}\n" in dockerfile
    assert f"mkdir -p {cache}" in dockerfile
    assert runs["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_termination_grace_period_covers_removal_from_discovery_and_drain(
    component: str,
) -> None:
    hook_s = container(component)["lifecycle"]["preStop"]["sleep"]["seconds"]

    assert hook_s >= (FIND_EVERY_S if component in NODES else 0) + SERVICES_HEAR_WITHIN_S
    assert pod(component)["spec"]["terminationGracePeriodSeconds"] > hook_s + DRAIN_TIMEOUT_S


def test_no_overlay_changes_options_that_hooks_depend_on() -> None:
    for path in SETTINGS:
        assert "drain-timeout-s" not in path.read_text()
        assert "find-every-s" not in path.read_text()


def test_kustomizations_use_known_kinds() -> None:
    kinds = {read_yaml(path)["kind"] for path in manifests.kustomizations()}

    assert kinds == {"Kustomization", "Component"}


def test_nodes_can_have_several_processes(tmp_path: Path) -> None:
    found = render_with(tmp_path, "cpu-demo", "ranks")
    workloads = [one for one in found if one["kind"] in ("StatefulSet", "Deployment")]

    assert workloads
    for one in workloads:
        [runs] = one["spec"]["template"]["spec"]["containers"]
        is_node = one["kind"] == "StatefulSet"
        assert ("--tensor-parallel-size=2" in runs["args"]) is is_node
