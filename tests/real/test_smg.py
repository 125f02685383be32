"""SMG's own gateway in front of Baton's router: `pytest tests/real/test_smg.py --smg-venv VENV -s`.

VENV has smg 1.13.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.cluster import Child, ClusterOptions, LocalCluster
from baton.kv_transfer.config import SenderConfig
from tests.support.nodes import card_at, load_at
from tests.support.scrapes import Scrape
from tests.support.smg_gateway import Load, Outcomes, smg_gateway
from tests.support.waits import await_value

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "demo"
NUM_REQUESTS = 500
# Requests at which a node dies, and at which it starts again.
DEATHS = {100: "prefill", 300: "decode"}
RESTARTS = {200: "prefill", 400: "decode"}
MAX_HOLD_S = SenderConfig().hold_s + 30
PROMPT_CHARACTERS = 600
KV_BYTES = "baton_kv_bytes_total"
NODE_ARGUMENTS = ("--kv-cache-memory", "64MiB", "--threads", "1", "--metrics-port", "0")


@dataclass(frozen=True)
class World:
    venv: Path
    cluster: LocalCluster
    prompts: Sequence[str]
    wanted: Sequence[str]  # by Baton's own API

    def kv_bytes(self) -> float:
        """Return the bytes that the decode node that does not die has received."""
        return Scrape(self.cluster.decodes[1]).total(KV_BYTES)

    def first(self, role: str) -> Child:
        return (self.cluster.prefills if role == "prefill" else self.cluster.decodes)[0]

    def run(self, url: str) -> Outcomes:
        """Send all requests. For some, a prefill node is dead, and for others a decode node."""
        flush(url)
        before = self.kv_bytes()
        began_s = time.monotonic()

        def disturb(number: int) -> None:
            if number in DEATHS:
                self.first(DEATHS[number]).process.kill()
                self.first(DEATHS[number]).process.wait()
            if number in RESTARTS:
                self.cluster.restart(self.first(RESTARTS[number]))

        outcomes = Load(url, self.prompts, self.wanted).run(disturb)
        moved = self.kv_bytes() - before
        print(
            f"\n{sum(outcomes.right.values())} of {len(self.prompts)} right "
            f"({dict(outcomes.right)}), {len(outcomes.refused)} refused, "
            f"{len(outcomes.wrong)} wrong; {moved:.0f} bytes of KV moved to decode-1; "
            f"{time.monotonic() - began_s:.0f} s"
        )
        for reason, count in Counter(reason for *_, reason in outcomes.refused).most_common():
            print(f"{count} refused: {reason}")
        assert not outcomes.wrong
        assert moved > 0
        for node in self.cluster.nodes:
            assert node.process.poll() is None, node.log
            await_free(node.address)
        return outcomes


def await_free(address: str) -> None:
    """Wait until all blocks of a node are free.

    A prefill node holds KV for a decode node that died before it granted blocks.
    """
    await_value(lambda: is_free(address), what=f"the blocks of {address} are free")


def is_free(address: str) -> bool:
    """Return whether all blocks are free; False if gRPC has not connected to a restarted node."""
    try:
        return load_at(address).num_free_blocks == card_at(address).num_blocks
    except grpc.RpcError:
        return False


def post(url: str, path: str, **body: Any) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as refusal:
        with refusal:
            raise AssertionError(refusal.read().decode()) from refusal


def flush(url: str) -> None:
    """Clear the caches of all nodes, by the gateway."""
    assert post(url, "/flush_cache")["status"] == "success"


@pytest.fixture(scope="module")
def world(pytestconfig: pytest.Config) -> Iterator[World]:
    venv = pytestconfig.getoption("--smg-venv")
    if venv is None:
        pytest.skip("needs --smg-venv")
    text = (MODEL / "LICENSE-PYTHON.txt").read_text()
    starts = range(0, NUM_REQUESTS * 11, 11)
    prompts = [text[start : start + PROMPT_CHARACTERS] for start in starts]
    options = ClusterOptions(
        str(MODEL),
        2,
        2,
        node_arguments=NODE_ARGUMENTS,
        router_arguments=("--http-port", "0", "--smg"),
    )
    with LocalCluster(options) as cluster:
        baton = f"http://{cluster.router.http_address}"
        # The gateway sends prompts without the tokens that a tokenizer puts in front.
        given = {"max_tokens": 16, "temperature": 0, "add_special_tokens": False}
        wanted = [
            choice["text"]
            for first in range(0, NUM_REQUESTS, 50)
            for choice in post(
                baton, "/v1/completions", prompt=prompts[first : first + 50], **given
            )["choices"]
        ]
        yield World(Path(venv), cluster, prompts, wanted)


@pytest.fixture(scope="module")
def gateway(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    workers = ("--worker-urls", f"grpc://{world.cluster.router.address}")
    log = tmp_path_factory.mktemp("smg") / "router.log"
    with smg_gateway(world.venv, workers, log) as url:
        yield url


def test_answers_are_those_of_baton(world: World, gateway: str) -> None:
    outcomes = world.run(gateway)
    assert not outcomes.refused  # Baton's router retries


def test_chats_have_logprobs_and_structured_output(gateway: str) -> None:
    messages = [{"role": "user", "content": "Name a city."}]
    chat = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 40}
    counted = post(gateway, "/v1/chat/completions", **chat, logprobs=True, top_logprobs=2)
    [choice] = counted["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == counted["usage"]["completion_tokens"]
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in entries)

    schema = {
        "type": "object",
        "properties": {"is_large": {"type": "boolean"}},
        "required": ["is_large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    formed = post(gateway, "/v1/chat/completions", **chat, response_format=form)
    assert set(json.loads(formed["choices"][0]["message"]["content"])) == {"is_large"}
