"""Unmodified clients of chats, messages and responses against a real cluster.

LangChain's are installed for tests. The tests of others are skipped without them, which need other
versions or hundreds of MiB: pip install instructor litellm
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from baton.client import Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.langchain_clients import LANGCHAIN, langchain_chat
from tests.support.scripted_agent import FOX, SEEN, TEXT, THOUGHT

# Of the clients and their libraries.
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

PROMPT = "the quick brown"
AS_BATON: dict[str, Any] = {"ignore_eos": True}
SAMPLED: dict[str, Any] = {"seed": 3}
MAX_TOKENS = 16  # the least of OpenAI's Responses, to which litellm raises others


class Fox(BaseModel):
    """See a fox."""

    colour: Literal["red", "grey"]
    is_young: bool


@pytest.fixture(scope="module", autouse=True)
def _closed_clients() -> Iterator[None]:
    """Collect the connections that clients leave open."""
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture
def url(cluster: LocalCluster) -> str:
    return f"http://{cluster.router.http_address}"


@pytest.fixture
def expected(client: Client) -> str:
    """Return the greedy answer to PROMPT."""
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return client.generate([{"role": "user", "content": PROMPT}], Generation(greedy)).text


@pytest.mark.parametrize("connect", LANGCHAIN)
def test_langchain_answers(connect: Callable[..., Any], url: str, expected: str) -> None:
    model = connect(url, max_tokens=MAX_TOKENS, extra_body=AS_BATON)

    whole = model.invoke(PROMPT)
    chunks = list(model.stream(PROMPT))

    assert whole.text == "".join(chunk.text for chunk in chunks) == expected
    assert whole.usage_metadata["output_tokens"] == MAX_TOKENS
    streamed = sum(chunks[1:], chunks[0])
    assert streamed.usage_metadata["output_tokens"] == MAX_TOKENS


@pytest.mark.parametrize("connect", LANGCHAIN)
def test_langchain_calls_a_tool_and_sends_its_result(connect: Callable[..., Any], url: str) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    model = connect(url, max_tokens=400, extra_body=SAMPLED)
    forced = model.bind_tools([Fox], tool_choice="Fox")
    asked = messages.HumanMessage("fox")

    called = forced.invoke([asked])
    streamed = list(forced.stream([asked]))

    [call] = called.tool_calls
    assert call["name"] == "Fox"
    Fox.model_validate(call["args"])
    [again] = sum(streamed[1:], streamed[0]).tool_calls
    assert again["args"] == call["args"]
    result = messages.ToolMessage("a red one", tool_call_id=call["id"])
    answered = connect(url, max_tokens=4).bind_tools([Fox]).invoke([asked, called, result])
    assert answered.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("connect", LANGCHAIN)
def test_langchain_output_is_structured(connect: Callable[..., Any], method: str, url: str) -> None:
    model = connect(url, max_tokens=400, extra_body=SAMPLED)

    assert isinstance(model.with_structured_output(Fox, method=method).invoke("fox"), Fox)


@pytest.mark.parametrize("connect", LANGCHAIN)
def test_langchain_reads_reasoning_and_a_tool_that_the_model_calls(
    connect: Callable[..., Any], scripted: LocalCluster
) -> None:
    messages = pytest.importorskip("langchain_core.messages")
    model = connect(f"http://{scripted.router.http_address}", model="agent", max_tokens=64)
    asked = messages.HumanMessage("What is the weather?")
    weather = {"name": "get_weather", "description": "", "parameters": {"type": "object"}}
    tools = model.bind_tools([{"type": "function", "function": weather}])

    thought = model.invoke("think")
    called = tools.invoke([asked])
    [call] = called.tool_calls
    result = messages.ToolMessage("sesame", tool_call_id=call["id"])
    answered = tools.invoke([asked, called, result])

    assert thought.text.strip() == TEXT
    if connect is not langchain_chat:  # which drops reasoning_content
        [block] = [each for each in thought.content_blocks if each["type"] == "reasoning"]
        assert THOUGHT in json.dumps(block)
    assert (call["name"], call["args"]) == ("get_weather", {"location": "San Francisco, CA"})
    assert answered.text == SEEN


def test_instructor_with_a_schema_in_the_prompt(scripted: LocalCluster) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    url = f"http://{scripted.router.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as connected:
        client = instructor.from_openai(connected, mode=instructor.Mode.JSON)
        asked: Any = [{"role": "user", "content": "json_schema"}]
        found = client.chat.completions.create(
            model="agent", response_model=Fox, messages=asked, max_tokens=64, max_retries=0
        )

    assert found.model_dump() == FOX


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_with_openai(mode: str, url: str) -> None:
    instructor, openai = pytest.importorskip("instructor"), pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected:
        client = instructor.from_openai(connected, mode=instructor.Mode[mode])
        asked: Any = [{"role": "user", "content": "fox"}]
        found = client.chat.completions.create(
            model="tiny", response_model=Fox, messages=asked, max_tokens=400, max_retries=0, seed=3
        )

    assert isinstance(found, Fox)


def test_instructor_with_anthropic(url: str) -> None:
    instructor, anthropic = pytest.importorskip("instructor"), pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as connected:
        client = instructor.from_anthropic(connected, mode=instructor.Mode.ANTHROPIC_TOOLS)
        asked: Any = [{"role": "user", "content": "fox"}]
        found = client.messages.create(
            model="tiny",
            response_model=Fox,
            messages=asked,
            max_tokens=400,
            max_retries=0,
            extra_body=SAMPLED,
        )

    assert isinstance(found, Fox)


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # instead of a download
    module = pytest.importorskip("litellm")
    yield module
    module.in_memory_llm_clients_cache.flush_cache()


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(provider: str, litellm: Any, url: str, expected: str) -> None:
    base = url if provider == "anthropic" else f"{url}/v1"
    common: dict[str, Any] = {
        "model": f"{provider}/tiny",
        "api_base": base,
        "api_key": "none",
        "num_retries": 0,
    }
    asked = [{"role": "user", "content": PROMPT}]
    own = AS_BATON if provider == "anthropic" else {"extra_body": AS_BATON}
    greedy = {"max_tokens": MAX_TOKENS, "temperature": 0, **own}

    whole = litellm.completion(**common, messages=asked, **greedy)
    chunks = litellm.completion(**common, messages=asked, **greedy, stream=True)

    assert whole.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert whole.usage.completion_tokens == MAX_TOKENS
    tool = {"type": "function", "function": {"name": "see", "parameters": Fox.model_json_schema()}}
    forced = {"type": "function", "function": {"name": "see"}}
    called = litellm.completion(
        **common, messages=asked, tools=[tool], tool_choice=forced, max_tokens=400
    )
    [call] = called.choices[0].message.tool_calls
    Fox.model_validate_json(call.function.arguments)
    structured = litellm.completion(**common, messages=asked, response_format=Fox, max_tokens=400)
    Fox.model_validate_json(structured.choices[0].message.content)


def test_litellm_responses(litellm: Any, url: str, expected: str) -> None:
    common: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0,
        "extra_body": AS_BATON,
    }

    whole = litellm.responses(**common, input=PROMPT)
    events = list(litellm.responses(**common, input=PROMPT, stream=True))

    assert whole.output[0].content[0].text == expected
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    assert json.loads(whole.model_dump_json())["usage"]["output_tokens"] == MAX_TOKENS
