"""HTTP manners that all APIs share: request ids, cross-origin requests, probes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI

from baton.core.errors import InvalidConfig
from baton.core.options import build_config
from baton.router.admission.rate_limits import RateLimitConfig
from baton.router.http.config import CorsConfig
from baton.rpc.security.token import AcceptedTokens
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.node_calls import FakeNodeCalls
from tests.support.waits import until_answer

PAGE = "https://chat.example"
TIMEOUT_S = 30
BODY: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
Scenario = Callable[[HttpRouter, Any], Awaitable[None]]


def over_http(scenario: Scenario, **around: Any) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(TIMEOUT_S),
            an_http_router(**around) as router,
            AsyncOpenAI(base_url=router.url, api_key="none") as client,
        ):
            await scenario(router, client._client)

    asyncio.run(run())


def test_every_response_has_the_clients_request_id_or_a_new_one() -> None:
    async def scenario(_router: HttpRouter, client: Any) -> None:
        paths = ("/health", "/version", "/v1/models", "/v1/models/tiny", "/v1/none", "/v1/models/x")
        for path in paths:
            ids = [
                (await client.get(path, headers=sent)).headers["x-request-id"]
                for sent in ({"x-request-id": "mine"}, {}, {"x-request-id": "x" * 300})
            ]
            assert ids[0] == "mine"
            assert len({*ids}) == 3
            assert all(len(each) == 24 for each in ids[1:])
        streamed = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
        assert streamed.headers.get_list("x-request-id") == ["mine"]

    over_http(scenario)


def test_responses_have_the_date() -> None:
    async def scenario(_router: HttpRouter, client: Any) -> None:
        date = parsedate_to_datetime((await client.get("/ping")).headers["date"]).timestamp()
        assert int(began_s) <= date <= time.time()

    began_s = time.time()
    over_http(scenario)


def test_a_request_without_a_token_is_refused_with_a_request_id() -> None:
    async def scenario(_router: HttpRouter, client: Any) -> None:
        refused = await client.get("/load", headers={"x-request-id": "mine"})

        assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
        assert (await client.get("/ping")).status_code == 200

    over_http(scenario, tokens=AcceptedTokens(("secret",)))


def test_a_router_without_nodes_is_alive_but_cannot_serve() -> None:
    async def scenario(router: HttpRouter, client: Any) -> None:
        paths = ("/live", "/health", "/ready", "/ping")
        for is_ready, status in ((False, 503), (True, 200)):
            await router.health.set_ready(is_ready)

            statuses = [(await client.get(path)).status_code for path in paths]

            assert statuses == [200, status, status, status]
            assert (await client.post("/ping")).status_code == status

    over_http(scenario)


def test_pages_of_other_origins_are_not_answered_by_default() -> None:
    async def scenario(_router: HttpRouter, client: Any) -> None:
        answer = await client.get("/v1/models", headers={"origin": PAGE})
        preflight = await client.options(
            "/v1/completions", headers={"origin": PAGE, "access-control-request-method": "POST"}
        )

        assert "allowed-origins" in preflight.json()["message"]
        for one in (answer, preflight):
            assert not [name for name in one.headers if name.startswith("access-control")]

    over_http(scenario)


def test_allowed_pages_may_call_with_a_token_and_read_the_headers() -> None:
    async def scenario(_router: HttpRouter, client: Any) -> None:
        preflight = {
            "origin": PAGE,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        asked = await client.options("/v1/completions", headers=preflight)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in asked.headers["access-control-allow-headers"]

        other = await client.options(
            "/v1/completions", headers={**preflight, "origin": "https://other.example"}
        )
        assert "access-control-allow-origin" not in other.headers

        secret = {"origin": PAGE, "authorization": "Bearer secret"}
        answer = await client.post("/v1/completions", json=BODY, headers=secret)
        refusal = await client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert (answer.status_code, refusal.status_code) == (200, 401)
        for one in (answer, refusal):
            assert one.headers["access-control-allow-origin"] == PAGE
            assert "x-request-id" in one.headers["access-control-expose-headers"]

    over_http(scenario, cors=CorsConfig((PAGE,)), tokens=AcceptedTokens(("secret",)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"allowed_origins": "chat.example"}, "scheme://host"),
        ({"allowed_origins": f"{PAGE}/page"}, "without a path"),
        ({"allowed_origins": "*", "allow_credentials": True}, "not \\*"),
        ({"allow_credentials": True}, "needs allowed-origins"),
    ],
)
def test_origins_that_no_browser_sends_are_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        build_config(CorsConfig, given)


def test_probes_of_other_servers_are_answered() -> None:
    async def scenario(router: HttpRouter, client: Any) -> None:
        for method in ("GET", "POST"):
            ping = await client.request(method, "/ping")
            assert (ping.status_code, ping.content) == (200, b"")
        assert (await client.get("/load")).json() == {"server_load": 0}
        model = (await client.get("/v1/models/tiny")).json()
        assert model == (await client.get("/v1/models")).json()["data"][0]

    over_http(scenario)


def test_a_client_over_its_limit_is_refused_and_others_are_not() -> None:
    limits = RateLimitConfig(client_requests_per_minute=2, client_tokens_per_minute=1000)

    async def scenario(_router: HttpRouter, client: Any) -> None:
        async def complete(token: str) -> Any:
            sent = {"authorization": f"Bearer {token}"}
            return await client.post("/v1/completions", json=BODY, headers=sent)

        first, second, third = [await complete("one") for _ in range(3)]
        assert [each.status_code for each in (first, second, third)] == [200, 200, 429]
        assert [each.headers["x-ratelimit-remaining-requests"] for each in (first, second)] == [
            *("1", "0")
        ]
        assert first.headers["x-ratelimit-remaining-tokens"] == "1000"
        assert second.headers["x-ratelimit-remaining-tokens"] == "993"  # 3 of the prompt, 4 more
        error = third.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["reason"] == "RATE_LIMITED"
        assert 28 <= int(third.headers["retry-after"]) <= 30
        assert third.headers["x-ratelimit-limit-requests"] == "2"
        assert (await complete("two")).status_code == 200

    over_http(scenario, rate_limits=limits, tokens=AcceptedTokens(("one", "two")))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_requests_that_generate_nothing_count_in_the_limits(path: str, body: Any) -> None:
    async def scenario(_router: HttpRouter, client: Any) -> None:
        statuses = [(await client.post(path, json=body)).status_code for _ in range(2)]
        assert statuses == [400, 429]  # this router has no tokenizer

    over_http(scenario, rate_limits=RateLimitConfig(client_requests_per_minute=1))


def test_a_client_that_disconnects_frees_its_place_and_pays_for_its_tokens() -> None:
    limits = RateLimitConfig(client_max_requests=1, client_tokens_per_minute=10_000)
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(_router: HttpRouter, client: Any) -> None:
        streamed = {**BODY, "stream": True, "max_tokens": 100}
        async with client.stream("POST", "/v1/completions", json=streamed) as answer:
            await anext(answer.aiter_lines())
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 429
            assert "in progress" in refused.json()["error"]["message"]
        # The router may not have noticed the end of the stream yet.
        again = await until_answer(
            lambda: client.post("/v1/embeddings", json={}), lambda reply: reply.status_code != 429
        )
        assert again.status_code == 400
        assert int(again.headers["x-ratelimit-remaining-tokens"]) < 9_998

    over_http(scenario, rate_limits=limits, node_calls=nodes)


def test_the_openapi_document_has_every_path_and_valid_schemas() -> None:
    async def scenario(_router: HttpRouter, client: Any) -> None:
        document = (await client.get("/openapi.json")).json()
        served = (await client.get("/none")).json()["error"]["message"]
        page = await client.get("/docs")

        paths = document["paths"]
        listed = [word.rstrip(",") for word in served.split() if word.startswith("/")][1:]
        assert {*paths, "/openapi.json", "/docs"} == {*listed}
        assert all(one["summary"] for operations in paths.values() for one in operations.values())
        schemas = document["components"]["schemas"]
        for schema in schemas.values():
            Draft202012Validator.check_schema(schema)
        completion = Draft202012Validator(
            {**document, "$ref": "#/components/schemas/CompletionBody"}
        )
        assert completion.is_valid(BODY)
        assert not completion.is_valid({**BODY, "other": 1})
        assert not completion.is_valid({**BODY, "n": 0})
        assert page.headers["content-type"].startswith("text/html")
        assert all(name in page.text for name in (*paths, *schemas))

    over_http(scenario)
