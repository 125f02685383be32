"""Strict calls in several formats, read by further routers of one cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from baton.cluster import ClusterOptions, LocalCluster
from baton.cluster.child import Child
from baton.cluster.local_cluster import await_serving
from baton.fork_server import ForkServer
from tests.support.scripted_agent import THOUGHT

MAX_S = 60
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "unit": {"enum": ["gram", "ton"]}},
    "required": ["place", "unit"],
    "additionalProperties": False,
}
FORMATS = {"openai": "harmony", "gemma4": "gemma"}  # parsers, and the messages of the script


@contextmanager
def a_router(cluster: LocalCluster, parser: str) -> Iterator[Child]:
    """Start a router that reads answers of the cluster's nodes by another parser."""
    [prefill], [decode] = cluster.prefills, cluster.decodes
    model = cluster.router.arguments[cluster.router.arguments.index("--model") + 1]
    nodes = [f"--prefill-nodes={prefill.address}", f"--decode-nodes={decode.address}"]
    reasoning = "openai_gptoss" if parser == "openai" else "none"
    parsers = [f"--tool-parser={parser}", f"--reasoning-parser={reasoning}"]
    where = ["--port=0", "--http-port=0"]
    router = Child(
        parser,
        ["router", "--model", model, *nodes, *parsers, *where],
        ClusterOptions(""),
        ForkServer(),
    )
    try:
        yield router
    finally:
        code = router.stop()
    assert code == 0


def answer_of(router: Child, message: str, *, is_strict: bool) -> Any:
    function: Any = {"name": "weigh", "parameters": SCHEMA, "strict": is_strict}
    base = f"http://{router.http_address}/v1"
    with OpenAI(base_url=base, api_key="none", max_retries=0, timeout=MAX_S) as client:
        return client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": message}],
            tools=[{"type": "function", "function": function}],
            temperature=0,  # off its script, the model finds all tokens equally likely
        )


def test_calls_of_other_formats_follow_the_schema_of_a_strict_tool(scripted: LocalCluster) -> None:
    with a_router(scripted, "openai") as one, a_router(scripted, "gemma4") as other:
        routers = {"openai": one, "gemma4": other}
        for router in routers.values():
            router.await_address(MAX_S)
            await_serving(router.address, MAX_S)
        answers = {
            (name, is_strict): answer_of(router, FORMATS[name], is_strict=is_strict)
            for name, router in routers.items()
            for is_strict in (False, True)
        }

    for (name, is_strict), answer in answers.items():
        message = answer.choices[0].message
        [call] = message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert arguments["place"] == "Rome"
        assert (arguments["unit"] in ("gram", "ton")) == is_strict, (name, arguments)
        assert answer.model_extra.get("warnings", []) == []
        if name == "openai":
            assert message.reasoning_content == THOUGHT
        else:
            assert message.content == "I see."
