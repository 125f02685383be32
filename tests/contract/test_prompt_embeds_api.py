"""Completions of embeddings over HTTP, with fake nodes."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import save

from baton.core.legs import LegKind
from baton.router.routing.served_models import Node
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.node_calls import FakeNodeCalls, a_node, a_table

SIZE = 4
LONGEST_S = 60


def text_of(num_rows: int, seed: int = 0) -> str:
    torch.manual_seed(seed)
    return base64.b64encode(save({"prompt_embeds": torch.randn(num_rows, SIZE)})).decode()


def that_takes_embeds(node: Node) -> Node:
    card = replace(
        node.card, prompt_embeds_size=SIZE, encodes_pictures=True, encoding_row_bytes=4 * SIZE
    )
    return Node(node.address, card)


def ask(
    *bodies: dict[str, Any],
    nodes: FakeNodeCalls | None = None,
    is_on: bool = True,
    able: bool = True,
    has_prefill: bool = True,
) -> list[tuple[int, Any]]:
    prefill, decode = a_node(LegKind.PREFILL), a_node(LegKind.DECODE)
    prefill = that_takes_embeds(prefill) if able else prefill
    table = a_table(*([prefill] if has_prefill else []), decode)

    async def main() -> list[tuple[int, Any]]:
        async with (
            asyncio.timeout(LONGEST_S),
            an_http_router(nodes, table=table) as router,
            httpx2.AsyncClient() as client,
        ):
            router.pipeline.takes_prompt_embeds = is_on
            return [await _post(client, router, body) for body in bodies]

    return asyncio.run(main())


async def _post(
    client: httpx2.AsyncClient, router: HttpRouter, body: dict[str, Any]
) -> tuple[int, Any]:
    body = {"max_tokens": 3, **body}
    response = await client.post(f"{router.url}/v1/completions", json=body)
    return response.status_code, response.json()


def test_the_prefill_node_gets_the_rows_and_the_decode_node_their_places() -> None:
    nodes = FakeNodeCalls()

    [(status, answer)] = ask({"prompt_embeds": text_of(130)}, nodes=nodes)

    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 130
    by_leg = {bool(each.request.pictures): each.request for each in nodes.received}
    assert set(by_leg) == {True, False}
    for request in by_leg.values():
        assert request.prompt_token_ids == (0,) * 130
        assert [each.num_tokens for each in request.media] == [128, 2]
    assert [each.height for each in by_leg[True].pictures] == [128, 2]


def test_several_prompts_and_answers() -> None:
    body = {"prompt_embeds": [text_of(3), text_of(5, seed=1)], "n": 2}

    [(status, answer)] = ask(body)

    assert (status, len(answer["choices"])) == (200, 4)
    assert answer["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a"}, "send either prompt or prompt_embeds"),
        ({"echo": True}, "no tokens for echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"prompt_embeds": "no"}, "prompt_embeds cannot be read"),
        ({"prompt_embeds": []}, "prompt_embeds"),
        ({"prompt_embeds": {"a": 1}}, "prompt_embeds is no text"),
        ({"prompt_embeds": [text_of(1)] * 200}, "at most 128"),
        ({"prompt_embeds": text_of(513)}, "has 513 rows"),
        ({"prompt_embeds": text_of(512)}, "context length"),
    ],
)
def test_errors_name_the_field(body: dict[str, Any], message: str) -> None:
    [(status, answer)] = ask({"prompt_embeds": text_of(3), **body})

    assert status == 400, answer
    assert message in answer["error"]["message"]


def test_it_is_off_unless_router_and_nodes_have_the_option() -> None:
    body = {"prompt_embeds": text_of(3)}

    [(status, answer)] = ask(body, is_on=False)
    [(other_status, other)] = ask(body, able=False)

    assert (status, other_status) == (400, 400)
    assert "--enable-prompt-embeds, without which this router is" in answer["error"]["message"]
    assert "without which the model's prefill nodes are" in other["error"]["message"]


def test_a_completion_without_any_prompt_is_refused() -> None:
    [(status, answer)] = ask({})

    assert (status, "prompt" in answer["error"]["message"]) == (400, True)


def test_it_is_unavailable_while_no_prefill_node_is_known() -> None:
    body = {"prompt_embeds": text_of(3)}

    [(status, answer), (other_status, other)] = ask(
        body, body | {"model": "other"}, has_prefill=False
    )

    assert (status, answer["error"]["code"]) == (503, "NO_NODES")
    assert "try again later" in answer["error"]["message"]
    assert (other_status, "'other' is not served" in other["error"]["message"]) == (404, True)
