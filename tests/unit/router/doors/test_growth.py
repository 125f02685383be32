"""Time of the doors to parse a body: in proportion to its size, whatever it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from baton.core.sampling import SamplingDefaults
from baton.router.doors.files import documents_in
from baton.router.doors.grpc import translate
from baton.router.doors.http_app import DESCRIPTIONS
from baton.router.doors.messages.parsed_message import message_from, prompt_to_count
from baton.router.doors.openai.request.bodies import (
    Body,
    DetokenizeBody,
    ResetBody,
    TokenizeChatBody,
    openai_body,
)
from baton.router.doors.openai.request.embedding_bodies import (
    EmbeddingBody,
    PoolBody,
    RerankBody,
    ScoreBody,
)
from baton.router.doors.openai.request.parsed_request import (
    ModelContext,
    ParsedRequest,
    chat_completion_from,
    completion_from,
)
from baton.router.doors.openai.request.prompts import chat_from, messages_from, parse_prompts
from baton.router.doors.openai.request.tool_choice import ClosingWork, close_objects
from baton.router.doors.openai.routes import LoadBody, UnloadBody
from baton.router.doors.responses.files import put_texts
from baton.router.doors.responses.parsed_response import NO_HISTORY, response_from
from baton.router.doors.responses.routes import compaction_from
from baton.router.http.bodies import json_object
from baton.router.parts import DocumentFile
from baton.router.values import ChatPrompt, Parsing
from baton.v1 import inference_pb2
from tests.support.growth import MAX_RATIO, growth

Fields = dict[str, Any]
MakeFields = Callable[[int], Fields]
CONTEXT = ModelContext(SamplingDefaults(), 1 << 20, Parsing("hermes"))
SIZE = 40  # of the smaller body, in repeated parts
TEXT = "data:,%41"


def chained(size: int) -> Fields:
    """Return a schema whose parts combine each other in a circle."""
    defs = {
        f"d{n}": {"properties": {f"p{n}": {}}, "allOf": [{"$ref": f"#/$defs/d{(n + 1) % size}"}]}
        for n in range(size)
    }
    combined = {
        f"q{n}": {"allOf": [{"$ref": f"#/$defs/d{n}"}], "properties": {"z": {}}}
        for n in range(size)
    }
    return {"type": "object", "$defs": defs, "properties": combined}


def function(name: str, parameters: Fields, **more: Any) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def user(content: Any) -> Fields:
    return {"role": "user", "content": content}


def functions(size: int) -> list[Fields]:
    parameters = {"type": "object", "properties": {"a": {"anyOf": [{}, {"properties": {}}]}}}
    return [function(f"f{n}", parameters, strict=True) for n in range(size)]


def chat(name: str, make: Callable[[int], Any], **more: Any) -> MakeFields:
    return lambda size: {"messages": [user("a")], name: make(size), **more}


FILE = {"type": "file", "file": {"file_data": TEXT, "filename": "a"}}
CALL = {"type": "function", "id": "a", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CHATS: list[MakeFields] = [
    lambda size: {"messages": [user("a")] * size},
    lambda size: {"messages": [user([{"type": "text", "text": "a"}] * size)]},
    lambda size: {"messages": [user([FILE] * min(size, 64))] * max(1, size // 64)},
    lambda size: {"messages": [{**ASSISTANT, "tool_calls": [CALL] * size}]},
    chat("tools", functions),
    chat("tools", functions, tool_choice="required"),
    chat(
        "response_format",
        lambda size: {"type": "json_schema", "json_schema": {"schema": chained(size)}},
    ),
    chat("chat_template_kwargs", lambda size: {f"v{n}": [n] for n in range(size)}),
    chat("logit_bias", lambda size: {str(n): 1 for n in range(size)}),
    chat("stop", lambda size: ["a" * size]),
]
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "a"}]}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}
MESSAGES: list[MakeFields] = [
    *CHATS[:2],
    lambda size: {"messages": [user([DOCUMENT] * min(size, 64))] * max(1, size // 64)},
    lambda size: {"messages": [{"role": "assistant", "content": [USE] * size}, user("a")]},
    lambda size: {"messages": [user([RESULT] * size)]},
    chat("tools", lambda size: [TOOL | {"name": f"f{n}"} for n in range(size)]),
    chat("system", lambda size: [{"type": "text", "text": "a"}] * size),
]
ITEMS = [
    user("a"),
    user([{"type": "input_text", "text": "a"}]),
    user([{"type": "input_file", "filename": "a", "file_data": TEXT}]),
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
]


def repeated(item: Fields, size: int) -> Fields:
    return {"input": [item] * size + [user("a")]}


RESPONSES: list[MakeFields] = [
    *(partial(repeated, item) for item in ITEMS),
    lambda size: {"input": "a", "tools": [{"type": "function", "name": "f"}] * size},
]


def named(name: str, **more: Any) -> list[MakeFields]:
    return [
        lambda size: {name: ["a"] * size, **more},
        lambda size: {name: "a" * size, **more},
    ]


def parse(kind: type[Body], fields: Fields) -> object:
    return openai_body(fields, kind)


def read_texts(parsed: ParsedRequest) -> ChatPrompt:
    [call] = parsed.calls
    assert isinstance(call.prompt, ChatPrompt)
    files = call.prompt.parts(DocumentFile)
    prompt = call.prompt.replaced(DocumentFile, [file.with_text("text") for file in files])
    assert prompt.num_characters
    return prompt


def read_chat(fields: Fields) -> object:
    return read_texts(chat_completion_from(fields, "id", CONTEXT))


def read_message(fields: Fields) -> object:
    parsed = message_from({"max_tokens": 1, **fields}, "id", CONTEXT)
    return read_texts(parsed.request)


def count_message(fields: Fields) -> object:
    return prompt_to_count(fields, CONTEXT)


def read_response(fields: Fields) -> bytes:
    parsed = response_from(fields, NO_HISTORY, "id", CONTEXT)
    put_texts(parsed.items, documents_in(read_texts(parsed.request)))
    history = parsed.conversation([])
    return response_from({"input": "a"}, history, "id", CONTEXT).conversation([])


def tokenize_chat(fields: Fields) -> object:
    body = openai_body(fields, TokenizeChatBody)
    return chat_from(messages_from(body.messages), body, body.tools).num_characters


# What each path with a body does with it, and bodies by the number of their parts.
DOORS: Mapping[str, tuple[Callable[[Fields], object], list[MakeFields]]] = {
    "/v1/completions": (
        lambda fields: completion_from(fields, "id", CONTEXT),
        [
            lambda size: {"prompt": "a" * size},
            lambda size: {"prompt": [[1] * size] * 128},
        ],
    ),
    "/v1/chat/completions": (read_chat, CHATS),
    "/v1/messages": (read_message, MESSAGES),
    "/v1/messages/count_tokens": (count_message, MESSAGES),
    "/v1/responses": (read_response, RESPONSES),
    "/v1/responses/compact": (
        lambda fields: compaction_from({"model": "m", **fields}),
        RESPONSES[:-1],
    ),
    "/v1/embeddings": (
        lambda fields: parse_prompts(openai_body(fields, EmbeddingBody).input, max_prompts=2048),
        named("input"),
    ),
    "/pooling": (
        lambda fields: parse_prompts(openai_body(fields, PoolBody).input, max_prompts=2048),
        named("input"),
    ),
    **dict.fromkeys(
        ("/v1/score", "/score"), (partial(parse, ScoreBody), named("text_1", text_2="a"))
    ),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        (partial(parse, RerankBody), [lambda size: {"query": "a", "documents": ["a"] * size}]),
    ),
    "/tokenize": (tokenize_chat, CHATS[:2]),
    "/detokenize": (partial(parse, DetokenizeBody), [lambda size: {"tokens": [1] * size}]),
    "/v1/load_lora_adapter": (
        partial(parse, LoadBody),
        [lambda size: {"lora_name": "a" * size, "lora_path": "a"}],
    ),
    "/v1/unload_lora_adapter": (
        partial(parse, UnloadBody),
        [lambda size: {"lora_name": "a" * size}],
    ),
    "/reset_prefix_cache": (partial(parse, ResetBody), [lambda size: {"tiers": ["kv"] * size}]),
}


def test_every_path_with_a_body_is_in_the_table() -> None:
    assert set(DOORS) == {path for path, described in DESCRIPTIONS.items() if described.bodies}


def slow_ones(read: Callable[[Fields], object], makes: list[MakeFields]) -> dict[int, float]:
    """Return growths that are not linear, by the number of the body."""

    def answer(make: MakeFields, size: int) -> None:
        read(json_object(json.dumps(make(size)).encode()))

    ratios = {number: growth(partial(answer, make), SIZE) for number, make in enumerate(makes)}
    return {number: ratio for number, ratio in ratios.items() if ratio > MAX_RATIO}


@pytest.mark.parametrize("path", DOORS)
def test_each_door_parses_bodies_in_linear_time(path: str) -> None:
    assert not slow_ones(*DOORS[path])


def test_schemas_are_closed_in_linear_time() -> None:
    assert growth(lambda size: close_objects(chained(size)), 200) <= MAX_RATIO
    whole = [function(f"f{n}", chained(30)) for n in range(300)]
    work = ClosingWork()
    for tool in whole:
        close_objects(tool["function"]["parameters"], work)
    # All tools of a request share one limit.
    assert -1000 < work.num_steps_left <= 0


def test_grpc_requests_are_translated_in_linear_time() -> None:
    def generate(size: int) -> None:
        messages = [inference_pb2.ChatMessage(role="user", content="a")] * size
        request = inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))
        translate.check_request(request, None)
        translate.calls_from(request, "id")[0].prompt.num_characters  # noqa: B018

    def embed(size: int) -> None:
        inputs = [inference_pb2.EmbedInput(text="a")] * size
        translate.embed_calls_from(inference_pb2.EmbedRequest(inputs=inputs), "id")

    for read in (generate, embed):
        assert growth(read, SIZE) <= MAX_RATIO
