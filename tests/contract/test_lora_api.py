"""Adapters over HTTP with vLLM's paths and fields, with the `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from baton.core.ids import AdapterRef
from baton.router.orders import adapter_updates
from tests.support.adapter_nodes import AdapterCluster, adapter_cluster, adapter_id
from tests.support.http_routers import an_http_router
from tests.support.node_calls import FakeNodeCalls
from tests.support.waits import until, until_answer

PATIENCE_S = 60
FILES = {"tenants/sql": "old", "tenants/new": "new"}
SQL = {"lora_name": "sql", "lora_path": "tenants/sql"}


@dataclass(frozen=True, slots=True)
class Door:
    """A router's HTTP API, and what is behind it."""

    url: str
    api: AsyncOpenAI
    cluster: AdapterCluster
    node_calls: FakeNodeCalls

    async def post(self, path: str, body: Any) -> tuple[int, str]:
        response = await self.api._client.post(
            self.url + path, json=body, headers={"authorization": f"Bearer {self.api.api_key}"}
        )
        return response.status_code, response.text

    async def refusal(self, path: str, body: Any) -> tuple[int, str, str]:
        status, text = await self.post(path, body)
        error = json.loads(text)["error"]
        return status, error["reason"], error["message"]


@asynccontextmanager
async def a_door(token: str = "operator") -> AsyncIterator[Door]:
    nodes = FakeNodeCalls()
    async with (
        adapter_cluster(FILES) as cluster,
        an_http_router(nodes, table=cluster.table, adapters=cluster.updates) as router,
        AsyncOpenAI(base_url=f"{router.url}/v1", api_key=token, max_retries=0) as api,
    ):
        yield Door(router.url, api, cluster, nodes)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(within())


def test_an_adapter_is_loaded_listed_used_and_unloaded() -> None:
    async def scenario() -> None:
        async with a_door() as door:
            done = await door.post("/v1/load_lora_adapter", SQL)
            assert done == (200, "Success: LoRA adapter 'sql' added successfully.")

            listed = {
                each.id: each.model_extra or {} for each in (await door.api.models.list()).data
            }
            assert {name: (each["parent"], each["root"]) for name, each in listed.items()} == {
                "tiny": (None, "tiny"),
                "sql": ("tiny", "tenants/sql"),
            }
            assert (await door.api.models.retrieve("sql")).id == "sql"

            answer = await door.api.completions.create(model="sql", prompt=[3, 4], max_tokens=3)
            assert answer.model == "sql"
            sent = {received.request.adapter for received in door.node_calls.received}
            assert sent == {AdapterRef("sql", adapter_id("old"), "tenants/sql")}
            assert len(door.node_calls.received) == 2  # both legs

            done = await door.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
            assert done == (200, "Success: LoRA adapter 'sql' removed successfully.")
            with pytest.raises(openai.NotFoundError, match="served: tiny"):
                await door.api.completions.create(model="sql", prompt=[3, 4])

    run(scenario)


def test_a_load_whose_client_disconnects_while_nodes_read_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_updates, "MAX_UPDATES", 1)
    monkeypatch.setattr(adapter_updates, "REFUSAL_PAUSE_S", 0)

    async def scenario() -> None:
        async with a_door() as door:
            first, last = door.cluster.nodes
            last.memory.may_read.clear()
            body = {"lora_name": "left", "lora_path": "tenants/new"}
            leaving = asyncio.ensure_future(door.post("/v1/load_lora_adapter", body))
            await until(lambda: adapter_id("new") in first.memory.loaded)
            assert (await door.post("/v1/load_lora_adapter", SQL))[0] == 429

            leaving.cancel()
            await asyncio.wait([leaving])
            last.memory.may_read.set()

            # The router notices soon that the client has gone, and takes the next one.
            await until_answer(
                lambda: door.post("/v1/load_lora_adapter", SQL), lambda reply: reply[0] != 429
            )
            assert last.adapters.keys() == {"sql"}

    run(scenario)


def test_requests_without_an_adapter_name_none() -> None:
    async def scenario() -> None:
        async with a_door() as door:
            await door.post("/v1/load_lora_adapter", SQL)

            for model in ("tiny", openai.NOT_GIVEN):
                await door.api.completions.create(model=model, prompt=[3], max_tokens=2)

            assert {each.request.adapter for each in door.node_calls.received} == {AdapterRef()}

    run(scenario)


def test_a_load_in_place_gives_the_name_other_weights() -> None:
    async def scenario() -> None:
        async with a_door() as door:
            await door.post("/v1/load_lora_adapter", SQL)
            status, reason, message = await door.refusal("/v1/load_lora_adapter", SQL)
            assert (status, reason) == (400, "INVALID_REQUEST")
            assert "'sql' has already been loaded" in message

            for node in door.cluster.nodes:
                node.write("tenants/sql", "newer")
            await door.post("/v1/load_lora_adapter", {**SQL, "load_inplace": True})

            await door.api.completions.create(model="sql", prompt=[3], max_tokens=2)
            sent = {each.request.adapter.id for each in door.node_calls.received}
            assert sent == {adapter_id("newer")}

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        ("load", {"lora_name": "sql"}, 400, "lora_path is missing"),
        ("load", {**SQL, "lora_path": ""}, 400, "must be given"),
        ("load", {**SQL, "rank": 8}, 400, "rank is not a known field"),
        ("load", {**SQL, "lora_path": "missing"}, 400, "decode-0: path 'missing'"),
        ("load", {**SQL, "lora_name": "tiny"}, 400, "name of a served model"),
        ("load", {**SQL, "model": "other"}, 404, "'other' is not served here"),
        ("unload", {}, 400, "lora_name is missing"),
        ("unload", {"lora_name": "sql"}, 404, "there is no adapter 'sql' here; served: tiny"),
    ],
)
def test_bad_orders_are_refused_with_the_cause(
    path: str, body: dict[str, object], status: int, expected: str
) -> None:
    async def scenario() -> None:
        async with a_door() as door:
            refused, _, message = await door.refusal(f"/v1/{path}_lora_adapter", body)

            assert (refused, expected in message) == (status, True), message
            assert door.cluster.held == {"prefill-0": set(), "decode-0": set()}

    run(scenario)


def test_only_operators_load_and_unload() -> None:
    async def scenario() -> None:
        async with a_door(token="client") as door:
            for path, body in (("load", SQL), ("unload", {"lora_name": "sql"})):
                status, reason, _ = await door.refusal(f"/v1/{path}_lora_adapter", body)
                assert (status, reason) == (403, "NOT_AN_OPERATOR")
        async with a_door(token="operator") as door:
            assert (await door.post("/v1/load_lora_adapter", SQL))[0] == 200

    run(scenario)
