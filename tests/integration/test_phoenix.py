"""Phoenix, a tracing UI, receives spans over OTLP, returns them and displays them.

`pip install arize-phoenix` in a virtual environment of its own, and put its `phoenix` on the PATH
or name it in BATON_PHOENIX.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.telemetry import names
from tests.support.models import prompt_of
from tests.support.nodes import kill_the_writer
from tests.support.ports import free_port
from tests.support.suspended_processes import suspended

PHOENIX = os.environ.get("BATON_PHOENIX") or shutil.which("phoenix") or ""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
IS_UP = "Uvicorn running on"
MOST_READS = 300
MOST_LOOKS = 10
PNG = b"\x89PNG"
LEAST_PNG_BYTES = 20_000  # an empty page of that size takes far less

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PHOENIX, reason="Phoenix is not installed (arize-phoenix)"),
]


@dataclass(frozen=True, slots=True)
class Phoenix:
    address: str
    otlp: str

    def spans(self, trace_id: str) -> list[dict[str, Any]]:
        reported = self._read("/v1/projects/default/spans?limit=1000")
        return [one for one in reported if one["context"]["trace_id"] == trace_id]

    def trace_page(self, trace_id: str) -> str:
        [project] = [one for one in self._read("/v1/projects") if one["name"] == "default"]
        return f"{self.address}/projects/{project['id']}/traces/{trace_id}"

    def _read(self, path: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(self.address + path, timeout=30) as response:
            reported: list[dict[str, Any]] = json.load(response)["data"]
        return reported


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    with running_phoenix(tmp_path_factory.mktemp("phoenix")) as one:
        yield one


@pytest.fixture(scope="module")
def trace_id(phoenix: Phoenix, cluster_options: Callable[..., ClusterOptions]) -> str:
    """Return the trace of a request whose decode node was killed, with all its spans."""
    otlp = ("--otlp-endpoint", phoenix.otlp, "--otlp-metrics-every-s", "0")
    options = cluster_options(num_decode=2, router_arguments=otlp)
    options = replace(options, node_arguments=(*options.node_arguments, *otlp))
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=120) as client:
        with suspended(*cluster.decodes):
            stream = client.stream(prompt_of(100, seed=2), LONG)
            next(stream)
            kill_the_writer(cluster)
        [finish] = [chunk.finish for chunk in stream if chunk.finish is not None]
        cluster.decodes = [one for one in cluster.decodes if one.process.poll() is None]
    return finish.served.trace_id


def test_phoenix_returns_the_exported_span_tree(phoenix: Phoenix, trace_id: str) -> None:
    spans = read_whole(phoenix, trace_id)

    by_id = {one["context"]["span_id"]: one for one in spans}
    [root] = [one for one in spans if one["parent_id"] is None]
    assert root["name"] == names.GENERATE
    assert root["attributes"][names.SERVED] == "migrated"
    for one in spans:
        assert one is root or one["parent_id"] in by_id, one["name"]
        assert one["attributes"][names.ROLE]  # it drops the attributes of the resource
    [failed] = [one for one in spans if one["status_code"] == "ERROR"]
    assert failed["attributes"][names.ERROR_TYPE] == "UNAVAILABLE"
    [again] = [one for one in spans if one["name"] == names.MIGRATE]
    [why] = again["events"]
    assert why["attributes"][names.NODE] == failed["attributes"][names.NODE]


@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
def test_phoenix_shows_both_attempts(phoenix: Phoenix, trace_id: str, tmp_path: Path) -> None:
    read_whole(phoenix, trace_id)
    page = phoenix.trace_page(trace_id)

    shown = in_chromium("--dump-dom", page).decode()
    picture = drawn(page, tmp_path / "phoenix.png")

    for name in (names.ADMIT, names.MIGRATE, names.KV_PUSH, names.DECODE_COMPUTE):
        assert f">{name}<" in shown, name
    assert picture.startswith(PNG)
    assert len(picture) > LEAST_PNG_BYTES


def read_whole(phoenix: Phoenix, trace_id: str) -> list[dict[str, Any]]:
    """Read the trace until it is complete; each read takes long enough to need no pause."""
    for _ in range(MOST_READS):
        spans = phoenix.spans(trace_id)
        if {names.GENERATE, names.DECODE_COMPUTE, names.KV_PUSH} <= {one["name"] for one in spans}:
            return spans
    raise AssertionError("Phoenix never gave the whole trace")


def drawn(page: str, into: Path) -> bytes:
    """Take screenshots until one is not empty: Chromium's timer is too short on a busy machine."""
    for _ in range(MOST_LOOKS):
        in_chromium(f"--screenshot={into}", page)
        if into.stat().st_size > LEAST_PNG_BYTES:
            break
    return into.read_bytes()


def in_chromium(what: str, page: str) -> bytes:
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--window-size=1600,1100", "--virtual-time-budget=30000", what, page),
    ]
    return subprocess.run(command, capture_output=True, check=True, timeout=300).stdout


@contextmanager
def running_phoenix(folder: Path) -> Iterator[Phoenix]:
    port, otlp_port = free_port(), free_port()
    environment = {
        **os.environ,
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(otlp_port),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    log = folder / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen([PHOENIX, "serve"], env=environment, stdout=out, stderr=out)
    try:
        while IS_UP not in log.read_text(errors="replace"):
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"Phoenix ended at once:\n{log.read_text(errors='replace')[-2000:]}")
        yield Phoenix(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{otlp_port}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


LONG = Generation(SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
