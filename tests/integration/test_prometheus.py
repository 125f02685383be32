"""Prometheus scrapes a real cluster: every shipped panel and rule has data."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.client import BatonError, Client, Generation
from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.models import prompt_of
from tests.support.ports import free_port
from tests.support.scrapes import metrics_at

FOLDER = Path(__file__).parents[2] / "deploy/observability"
PANELS = json.loads((FOLDER / "grafana/dashboards/baton.json").read_text())["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel.get("targets", [])]
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())
RECORDED = [
    rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
]
# These events do not occur here: Prometheus has no series, rather than 0.
NEVER_HERE = ('kind!="first"',)
IS_UP = "Server is ready to receive web requests"
MOST_ROUNDS = 60
ANY_PORT = ("--metrics-port", "0")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]


@pytest.fixture(scope="module")
def cluster(cluster_options: Callable[..., ClusterOptions]) -> Iterator[LocalCluster]:
    options = cluster_options(router_arguments=ANY_PORT)
    more = (*ANY_PORT, "--speculative", "ngram:4:fixed")
    options = replace(options, node_arguments=(*options.node_arguments, *more))
    with LocalCluster(options) as running:
        yield running


def test_every_panel_and_every_recorded_series_has_data(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    wanted = {one.replace("$__rate_interval", "30s") for one in EXPRESSIONS} | set(RECORDED)
    wanted -= {one for one in wanted if any(never in one for never in NEVER_HERE)}
    with running_prometheus(tmp_path, cluster) as address, Client(cluster.address) as client:
        for number in range(MOST_ROUNDS):
            work(client, number)
            unanswered = {one for one in wanted if not has_answer(address, one)}
            if not unanswered:
                break
        rules = query_prometheus(address, "/api/v1/rules")["groups"]

    assert not unanswered
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
    firing = [rule["name"] for group in rules for rule in group["rules"] if rule.get("alerts")]
    assert "BatonNobodyDecodes" not in firing


def work(client: Client, number: int) -> None:
    """Send new requests in each round: a rate needs two scrapes that differ."""
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for place in range(3):
        client.generate(prompt_of(40, seed=3 * number + place), Generation(sampling))
    client.generate(4 * prompt_of(10, seed=number), Generation(sampling))  # predictable by n-grams
    with pytest.raises(BatonError):
        client.generate((5,), Generation(sampling, model="other"))


def has_answer(address: str, expression: str) -> bool:
    """Return whether the expression has a number for at least one series."""
    query = urllib.parse.urlencode({"query": expression})
    found = query_prometheus(address, f"/api/v1/query?{query}")["result"]
    return any(one["value"][1] != "NaN" for one in found)


def query_prometheus(address: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(address + path, timeout=30) as response:
        reported: dict[str, Any] = json.load(response)
    assert reported["status"] == "success"
    data: dict[str, Any] = reported["data"]
    return data


def config_for(cluster: LocalCluster) -> dict[str, Any]:
    """Return the shipped configuration with this cluster's addresses and a short interval."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "rules.yaml")]
    children: dict[str, list[Child]] = {
        "router": [cluster.router],
        "prefill": cluster.prefills,
        "decode": cluster.decodes,
    }
    for job in config["scrape_configs"]:
        addresses = [
            urllib.parse.urlsplit(metrics_at(child)).netloc for child in children[job["job_name"]]
        ]
        job.pop("dns_sd_configs")
        job["static_configs"] = [{"targets": addresses}]
    return config


@contextmanager
def running_prometheus(folder: Path, cluster: LocalCluster) -> Iterator[str]:
    settings, log, address = folder / "prometheus.yaml", folder / "log.txt", ""
    settings.write_text(yaml.safe_dump(config_for(cluster)))
    subprocess.run(["promtool", "check", "config", str(settings)], check=True, capture_output=True)
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address={address}",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        while IS_UP not in log.read_text():
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"Prometheus ended at once:\n{log.read_text()[-2000:]}")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)
