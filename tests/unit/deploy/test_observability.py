"""Configuration of deploy/observability: it uses existing metrics at existing addresses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_lines import option
from tests.support.yaml_files import read_yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy/observability"
DASHBOARD = FOLDER / "grafana/dashboards/baton.json"
METRIC = re.compile(r"\b(?:baton|gen_ai)_\w+\b")
RECORDED = re.compile(r"\bbaton:[\w:]+")
LABELS = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"|(?:by|on) \(([^)]*)\)")
OF_PROMETHEUS = {"job", "instance", "le"}


def golden() -> dict[str, set[str]]:
    lines = (ROOT / "tests/golden/metrics.txt").read_text().splitlines()
    return {name: set(labels) for name, *labels in map(str.split, lines)}


def rules() -> list[dict[str, Any]]:
    groups = read_yaml(FOLDER / "rules.yaml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + [target["expr"] for _, target in targets()]


def used_labels(expression: str) -> set[str]:
    found = LABELS.findall(expression)
    return {name.strip() for one, several in found for name in (one, *several.split(",")) if name}


@pytest.mark.parametrize("expression", expressions())
def test_every_queried_metric_and_label_is_exported(expression: str) -> None:
    known, recorded = golden(), {rule.get("record") for rule in rules()}
    metrics = set(METRIC.findall(RECORDED.sub("", expression)))

    assert metrics <= set(known)
    assert set(RECORDED.findall(expression)) <= recorded
    assert metrics or RECORDED.search(expression)
    reported = OF_PROMETHEUS.union(*(known[name] for name in metrics))
    assert used_labels(expression) <= reported


@pytest.mark.parametrize(("panel", "target"), list(targets()), ids=lambda one: str(one)[:30])
def test_every_legend_uses_labels_of_its_query(panel: str, target: dict[str, Any]) -> None:
    wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    recorded = {rule.get("record"): rule["expr"] for rule in rules()}
    expression = RECORDED.sub(lambda one: recorded[one[0]], target["expr"])

    assert wanted <= used_labels(expression), panel


def test_every_metric_is_in_a_dashboard_or_an_alert() -> None:
    used = {name for expression in expressions() for name in METRIC.findall(expression)}
    left_out = {
        "baton_handoffs_open",
        "baton_kv_transport",
        "baton_passes",
        "baton_queue_wait_seconds",
        "baton_request_kv_bytes",
        "baton_tokens_sampled",
        "gen_ai_server_request_duration_seconds",
    }
    own = [name for name in golden() if not name.startswith("vllm:")]
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in own}

    drawn = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in used}
    assert families - drawn == left_out


def test_every_alert_has_a_description_and_a_severity() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]

    assert alerts
    for alert in alerts:
        assert (
            alert["annotations"]["summary"].endswith(".") or "?" in alert["annotations"]["summary"]
        )
        assert alert["labels"]["severity"] in ("page", "warn")


def test_dashboard_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("role", ["router", "prefill", "decode", "encode"])
def test_prometheus_scrapes_each_process_at_its_metrics_port(role: str) -> None:
    jobs = read_yaml(FOLDER / "prometheus.yaml")["scrape_configs"]
    [requested] = [job["dns_sd_configs"][0] for job in jobs if job["job_name"] == role]
    services = read_yaml(ROOT / "docker-compose.yml")["services"]
    command = services[role]["command"]

    assert requested["names"] == [name for name in (role, f"{role}-gpu") if name in services]
    assert option(command, "metrics-port") == str(requested["port"])
    assert option(command, "metrics-host") == "0.0.0.0"


def test_grafana_finds_its_provisioned_files() -> None:
    provisioning = FOLDER / "grafana/provisioning"
    [source] = read_yaml(provisioning / "datasources/prometheus.yaml")["datasources"]
    [provider] = read_yaml(provisioning / "dashboards/baton.yaml")["providers"]
    mounts = read_yaml(ROOT / "docker-compose.yml")["services"]["grafana"]["volumes"]

    assert {target["datasource"]["uid"] for _, target in targets()} == {source["uid"]}
    assert provider["options"]["path"] in {mount.split(":")[1] for mount in mounts}


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_accepts_the_rules() -> None:
    command = ["promtool", "check", "rules", str(FOLDER / "rules.yaml")]

    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
