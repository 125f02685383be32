"""Requests whose prompt a vLLM server has computed, through router and decode node.

The server is faked: a real side channel and NIXL agent, over KV that Baton's runner has computed.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.foreign_kv import ForeignKv
from baton.core.sampling import SamplingParams
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.kv_transfer.layout import KvLayout
from baton.rpc.node_info import NodeAvailability, NodeStatus
from tests.support.fake_vllm import HOST, FakeGeometry, FakeVllm
from tests.support.fake_vllm_server import FakeVllmServer
from tests.support.models import prompt_of
from tests.support.nodes import await_all_free
from tests.support.vllm_blocks import prefill

PROMPT, OTHER = prompt_of(75), prompt_of(75, seed=9)
NUM_READ = 64  # tokens in full blocks
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@dataclass
class World:
    cluster: LocalCluster
    client: Client
    server: FakeVllm
    api: FakeVllmServer
    prompt_blocks: tuple[int, ...]
    other_blocks: tuple[int, ...]
    num_requests: int = 0

    def kv(self, block_ids: tuple[int, ...]) -> ForeignKv:
        """Return KV that no other request has used."""
        self.num_requests += 1
        return self.server.kv(block_ids, f"cmpl-{self.num_requests}")

    def generate(self, kv: ForeignKv | None = None) -> tuple[tuple[int, ...], dict[str, int]]:
        """Return the answer to PROMPT, and the tokens of the prompt that were loaded."""
        params = "" if kv is None else json.dumps(self.server.params(kv, len(PROMPT)))
        return self.answer(PROMPT, Generation(GREEDY, kv_transfer_params=params))

    def answer(
        self, prompt: Sequence[int], asked: Generation
    ) -> tuple[tuple[int, ...], dict[str, int]]:
        answer = self.client.generate(prompt, asked)
        assert answer.finish is not None
        return tuple(answer.token_ids), dict(answer.finish.served.prompt_tokens_loaded)

    def await_state(self, state: NodeAvailability) -> NodeStatus:
        """Wait until the router reports the server so, and return the report."""

        async def run() -> NodeStatus:
            async with (
                asyncio.timeout(60),
                AsyncClient(self.cluster.address) as client,
                aclosing(client.nodes(0.1)) as updates,
            ):
                async for nodes in updates:
                    [status] = [node for node in nodes if node.address == self.api.address]
                    if status.state is state:
                        return status
            raise AssertionError("the router ended")

        return asyncio.run(run())

    def post(self, **fields: Any) -> dict[str, Any]:
        body = {"prompt": list(PROMPT), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{self.cluster.router.http_address}/v1/completions",
            json.dumps(body | fields).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))


@pytest.fixture(scope="module")
def world(model_folder: Path, cluster_options: Callable[..., ClusterOptions]) -> Iterator[World]:
    layout = KvLayout("float32", 16, 2, 2, 16)
    with (
        FakeVllm(FakeGeometry(layout, str(model_folder))) as server,
        load_runner(RunnerConfig(str(model_folder), kv_cache_bytes=1 << 20)) as runner,
        FakeVllmServer(server, runner, str(model_folder)) as api,
    ):
        blocks, others = (prefill(server, runner, each).block_ids for each in (PROMPT, OTHER))
        arguments = ("--http-port", "0", "--prefill-nodes", api.address)
        options = cluster_options(num_prefill=0, router_arguments=arguments)
        sources = ("--kv-sources", f"vllm://{HOST}:{server.port}?packing=vec")
        options = replace(options, decode_arguments=sources)
        with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
            yield World(cluster, client, server, api, blocks, others)
    assert {child.process.returncode for child in cluster.children} == {0}


def test_kv_of_the_server_gives_the_same_tokens(world: World) -> None:
    kv = world.kv(world.prompt_blocks)
    answer, loaded = world.generate(kv)
    assert loaded == {"vllm": NUM_READ}
    world.server.await_note(lambda note: note == f"{kv.request_id}:1")
    assert answer == world.generate()[0]


def test_kv_of_another_prompt_changes_the_answer_of_its_request_alone(world: World) -> None:
    """The KV is really used, and a client cannot poison the prefix cache for others."""
    wrong, loaded = world.generate(world.kv(world.other_blocks))
    right, _ = world.generate()
    assert loaded == {"vllm": NUM_READ}
    assert wrong != right
    assert world.generate(world.kv(world.prompt_blocks))[0] == right
    assert world.generate()[0] == right


def test_http_clients_relay_the_parameters(world: World) -> None:
    expected = world.post()
    kv = world.kv(world.prompt_blocks)
    answer = world.post(kv_transfer_params=world.server.params(kv, len(PROMPT)))
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    details = answer["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": NUM_READ, "loaded_tokens": {"vllm": NUM_READ}}


def test_kv_that_is_used_twice_is_computed_the_second_time(world: World) -> None:
    kv = world.kv(world.prompt_blocks)
    first, loaded = world.generate(kv)
    assert loaded == {"vllm": NUM_READ}
    assert world.generate(kv) == (first, {})


def test_kv_of_an_engine_that_is_gone_is_computed(world: World) -> None:
    gone = replace(world.kv(world.prompt_blocks), engine_id="engine-0")
    assert world.generate(gone) == (world.generate()[0], {})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"remote_host": "169.254.169.254"}, "--kv-sources"),
        ({"remote_port": 22}, "--kv-sources"),
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"tp_size": 2}, "tp_size"),
        ({"age_s": -1}, "age_s"),
        ({"remote_block_ids": [[1], [2]]}, "remote_block_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_by_name(
    world: World, change: dict[str, Any], named: str
) -> None:
    params = world.server.params(world.kv(world.prompt_blocks), len(PROMPT))
    error = world.post(kv_transfer_params=params | change)["error"]
    assert error["param"].startswith("kv_transfer_params")
    assert named in error["message"]


def test_several_answers_are_refused(world: World) -> None:
    params = world.server.params(world.kv(world.prompt_blocks), len(PROMPT))
    assert "one answer" in world.post(kv_transfer_params=params, n=2)["error"]["message"]


def test_requests_that_are_cancelled_in_any_state_leave_nothing_behind(world: World) -> None:
    """Cancelled while they wait, are read, or decode: the server releases the KV of each."""
    given = [world.kv(world.prompt_blocks) for _ in range(24)]
    expected, _ = world.generate()

    async def run(client: AsyncClient, number: int, kv: ForeignKv) -> tuple[int, ...] | None:
        params = json.dumps(world.server.params(kv, len(PROMPT)))
        long = replace(GREEDY, max_tokens=12 if number % 3 == 0 else 200)
        chunks = client.stream(PROMPT, Generation(long, kv_transfer_params=params))
        token_ids: list[int] = []
        async with asyncio.timeout(None if number % 3 == 0 else 0.01 * number), aclosing(chunks):
            async for chunk in chunks:
                token_ids += chunk.token_ids
        return tuple(token_ids)

    async def run_all() -> list[tuple[int, ...] | BaseException | None]:
        async with AsyncClient(world.cluster.address) as client:
            runs = (run(client, number, kv) for number, kv in enumerate(given))
            return await asyncio.gather(*runs, return_exceptions=True)

    answers = asyncio.run(run_all())

    assert [each for each in answers[::3] if each != expected] == []
    assert any(isinstance(each, TimeoutError) for each in answers)
    await_all_free(world.cluster.decodes[0].address)
    # A request that was cancelled on its way to the node had no KV read: its lease ends.
    reached = [kv for kv in given if f"{kv.request_id}:1" in world.server.notes]
    assert len(reached) >= 8
    assert world.generate(world.kv(world.prompt_blocks)) == (expected, {"vllm": NUM_READ})


def test_the_router_lets_the_server_compute_prompts(world: World) -> None:
    """After a check with the node, by which the server is refused first."""
    prompt, salted = prompt_of(200, seed=10), Generation(GREEDY, cache_salt="other")
    world.api.logprobs_apart, world.api.is_healthy = 0.5, True
    refused = world.await_state(NodeAvailability.MISMATCHED)
    assert "other weights: logprobs of a text are 0.50 apart" in refused.reason
    expected, loaded = world.answer(prompt, salted)
    assert loaded == {}

    world.api.is_healthy = False
    world.await_state(NodeAvailability.UNREACHABLE)
    world.api.logprobs_apart, world.api.is_healthy = 0.0, True
    world.await_state(NodeAvailability.READY)
    world.server.await_note(lambda note: note == f"cmpl-http-{world.api.num_prompts}:1")
    assert world.answer(prompt, Generation(GREEDY)) == (expected, {"vllm": 192})
    assert world.api.headers[-1]["traceparent"]
    # The router has asked for the prompt itself, so that the KV is shared.
    num_asked = world.api.num_prompts
    assert world.answer(prompt, Generation(GREEDY)) == (expected, {})
    assert world.api.num_prompts == num_asked + 1
    world.api.is_healthy = False
    world.await_state(NodeAvailability.UNREACHABLE)
    assert world.answer(prompt_of(200, seed=11), Generation(GREEDY))[1] == {}
    # What nodes compute does not use it: a server's KV differs a little from theirs.
    again = world.client.generate(prompt, Generation(GREEDY))
    assert tuple(again.token_ids) == expected
    assert again.finish is not None
    assert again.finish.served.prompt_tokens_cached_on_decode == 0


def test_kv_that_the_server_may_have_released_is_computed(world: World) -> None:
    """The client relays the parameters late, and says so; or the server has said when it ends."""
    expected = world.post()
    late_clock = {"remote_blocks_expiry_time": time.perf_counter() + 1.0}
    for late, is_held in (({"age_s": 35}, False), (late_clock, True)):
        kv = world.kv(world.other_blocks)
        params = world.server.params(kv, len(PROMPT)) | late
        answer = world.post(kv_transfer_params=params)
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
        assert "loaded_tokens" not in answer["usage"]["prompt_tokens_details"]
        if is_held:
            world.server.await_note(f"{kv.request_id}:1".__eq__)


def test_a_server_that_does_not_answer_costs_computing(world: World) -> None:
    """Last: it leaves the server avoided."""
    expected, _ = world.generate()
    world.server.metadata["engine_id"] = "engine-9"
    world.server.answers = False
    kv = replace(world.kv(world.prompt_blocks), engine_id="engine-9")
    assert world.generate(kv) == (expected, {})
