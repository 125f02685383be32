"""Documents in the messages of all HTTP APIs, with fake nodes."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import connect

from baton.router.input_processing.tokenization import TextBoundary
from baton.router.tracing import Tracing
from baton.router.values import ChatPrompt, Prompt
from tests.support.confined_processes import confined_process_of, end_of
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.pdf_files import LOCK, SHOW_IMAGE, SPACES, data_url, pdf_of, show
from tests.support.tracers import TakingTracer

pytest.importorskip("pypdfium2", reason="baton[documents] is not installed")

MAX_S = 60
PDF = pdf_of(show("The sky is red."))
BOMB = pdf_of(SPACES)
QUESTION = "What colour?"
TRACED = {"traceparent": f"00-{1:032x}-{1:016x}-01"}
NOT_TRACED = {"traceparent": f"00-{1:032x}-{1:016x}-00"}
PDF_TEXT = "File sky.pdf:\n\nThe sky is red."
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Words:
    """Detokenizer that writes each token as a word."""

    def push(self, *token_ids: int) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def finish(self) -> str:
        return ""


class Prompts(TextBoundary):
    """Keeps the last message of each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def token_ids(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[int, ...]:
        if isinstance(prompt, ChatPrompt):
            self.seen.append("|".join(message.text for message in prompt.messages))
            return (1, 2, 3)
        return super().token_ids(prompt, max_tokens)

    def create_detokenizer(self, shown: Collection[str] = ()) -> Words:
        return Words()


Scenario = Callable[[HttpRouter, httpx2.AsyncClient, Prompts], Awaitable[None]]


def with_router(scenario: Scenario, **around: Any) -> None:
    async def run() -> None:
        prompts = Prompts()
        async with (
            asyncio.timeout(MAX_S),
            an_http_router(text=prompts, **around) as router,
            httpx2.AsyncClient(base_url=router.url, timeout=MAX_S) as client,
        ):
            await scenario(router, client, prompts)

    asyncio.run(run())


def chat(*files: dict[str, Any], **fields: Any) -> dict[str, Any]:
    parts = [{"type": "file", "file": file} for file in files]
    content = [*parts, {"type": "text", "text": QUESTION}]
    return {"max_tokens": 2, "messages": [{"role": "user", "content": content}], **fields}


def response(*files: dict[str, Any], **fields: Any) -> dict[str, Any]:
    parts = [{"type": "input_file", **file} for file in files]
    content = [*parts, {"type": "input_text", "text": QUESTION}]
    message = {"type": "message", "role": "user", "content": content}
    return {"model": "tiny", "input": [message], "max_output_tokens": 2, **fields}


def message(*documents: dict[str, Any], **fields: Any) -> dict[str, Any]:
    blocks = [{"type": "document", **document} for document in documents]
    content = [*blocks, {"type": "text", "text": QUESTION}]
    return {"max_tokens": 2, "messages": [{"role": "user", "content": content}], **fields}


def inline(data: bytes, name: str = "sky.pdf") -> dict[str, Any]:
    return {"filename": name, "file_data": base64.b64encode(data).decode()}


def source(kind: str, data: str, media_type: str = "text/plain") -> dict[str, Any]:
    return {"source": {"type": kind, "media_type": media_type, "data": data}}


PDF_BLOCK = {
    **source("base64", base64.b64encode(PDF).decode(), "application/pdf"),
    "title": "sky.pdf",
}
CALL = {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "t"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


def test_documents_are_texts_in_the_prompt() -> None:
    texts = [{"type": "text", "text": "in"}] * 2
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        (
            CHAT,
            chat(inline(PDF), inline("Grün".encode(), "a.md")),
            [PDF_TEXT, "File a.md:\n\nGrün"],
        ),
        (CHAT, chat({"file_data": data_url(PDF)}), ["File:\n\nThe sky is red."]),
        (RESPONSES, response(inline(PDF)), [PDF_TEXT]),
        (
            RESPONSES,
            response({"file_url": data_url(b"hi", "text/x"), "filename": "a", "detail": "low"}),
            ["File a:\n\nhi"],
        ),
        (MESSAGES, message(PDF_BLOCK, source("text", "plain")), [PDF_TEXT, "File:\n\nplain"]),
        (
            MESSAGES,
            message(
                {"source": {"type": "content", "content": texts}},
                {**source("base64", "aGk="), "title": "T", "context": "old"},
            ),
            ["File:\n\nin\nin", "File T:\nold\n\nhi"],
        ),
    ]

    async def scenario(router: HttpRouter, client: httpx2.AsyncClient, prompts: Prompts) -> None:
        for path, body, expected in cases:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert prompts.seen[-1] == "\n".join([*expected, QUESTION])

    with_router(scenario)


def test_results_of_tools_may_have_documents() -> None:
    async def scenario(router: HttpRouter, client: httpx2.AsyncClient, prompts: Prompts) -> None:
        output = {**OUTPUT, "output": [{"type": "input_file", **inline(PDF)}]}
        result = {**RESULT, "content": [{"type": "document", **PDF_BLOCK}]}
        turns = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
        for path, body in (
            (RESPONSES, {**response(), "input": [CALL, output]}),
            (MESSAGES, {**message(), "messages": turns}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
        assert prompts.seen == [f"|{PDF_TEXT}"] * 2

    with_router(scenario)


def test_tokens_are_counted_and_conversations_compacted_with_their_documents() -> None:
    async def scenario(router: HttpRouter, client: httpx2.AsyncClient, prompts: Prompts) -> None:
        counted, tokenized = message(PDF_BLOCK), chat(inline(PDF))
        del counted["max_tokens"], tokenized["max_tokens"]
        for path, body in (
            (f"{MESSAGES}/count_tokens", counted),
            ("/tokenize", tokenized),
            (f"{RESPONSES}/compact", {"model": "tiny", "input": response(inline(PDF))["input"]}),
        ):
            assert (await client.post(path, json=body)).status_code == 200
        assert len(prompts.seen) == 3
        assert all(PDF_TEXT in prompt for prompt in prompts.seen)

    with_router(scenario)


def test_the_text_of_a_document_is_stored_and_its_response_continued() -> None:
    async def scenario(router: HttpRouter, client: httpx2.AsyncClient, prompts: Prompts) -> None:
        first = (await client.post(RESPONSES, json=response(inline(PDF)))).json()
        more = {**response(), "previous_response_id": first["id"]}
        assert (await client.post(RESPONSES, json=more)).status_code == 200
        async with connect(f"ws://{router.address}{RESPONSES}", proxy=None) as socket:
            event = {"type": "response.create", **response(inline(PDF)), "store": False}
            await socket.send(json.dumps(event))
            kinds: list[str] = []
            while kinds[-1:] != ["response.incomplete"]:
                kinds.append(json.loads(await socket.recv())["type"])

        assert prompts.seen[0] == prompts.seen[2] == f"{PDF_TEXT}\n{QUESTION}"
        before, _answer, question = prompts.seen[1].split("|")
        assert (before, question) == (prompts.seen[0], QUESTION)

    with_router(scenario)


def test_what_is_left_out_is_a_warning_of_whole_and_streamed_answers() -> None:
    with_image = pdf_of(show("Look:") + SHOW_IMAGE)
    block = {
        **source("base64", base64.b64encode(with_image).decode(), "application/pdf"),
        "citations": {"enabled": True},
    }
    no_images = "{}: {}: images are left out"
    expected = {
        CHAT: [no_images.format("messages.0.content.0.file", "sky.pdf")],
        RESPONSES: [no_images.format("input.0.content.0", "sky.pdf")],
        MESSAGES: [
            "messages.0.content.0.citations: the answer has none",
            no_images.format("messages.0.content.0", "the file"),
        ],
    }
    bodies = {
        CHAT: chat(inline(with_image)),
        RESPONSES: response(inline(with_image)),
        MESSAGES: message(block),
    }

    async def scenario(router: HttpRouter, client: httpx2.AsyncClient, prompts: Prompts) -> None:
        for path, warnings in expected.items():
            whole = await client.post(path, json=bodies[path], headers=TRACED)
            assert whole.json()["warnings"] == warnings
            _, admit, *_ = await tracer.next_spans()
            assert [event.name for event in admit.events] == ["documents_read", "tokenized"]
            streamed = await client.post(
                path, json={**bodies[path], "stream": True}, headers=NOT_TRACED
            )
            assert json.dumps(warnings, separators=(",", ":")) in streamed.text

    tracer = TakingTracer()
    with_router(scenario, tracing=Tracing(tracer))


def test_what_cannot_be_read_is_refused_by_name_in_the_format_of_the_api() -> None:
    locked = pdf_of(show("secret"), more_of_trailer=LOCK)
    url = "http://127.0.0.1:9/a.pdf"
    of_url = {"source": {"type": "url", "url": url}}
    of_file = {"source": {"type": "file", "file_id": "file-1"}}
    image = {"type": "image", "source": {"type": "base64"}}
    of_content = {"source": {"type": "content", "content": [image]}}
    file, item, block = "messages.0.content.0.file", "input.0.content.0", "messages.0.content.0"
    cases: list[tuple[str, dict[str, Any], str, str]] = [
        (CHAT, chat({"file_id": "file-1"}), f"{file}.file_id", "files are not stored here"),
        (CHAT, chat({"filename": "a"}), f"{file}.file_data", "is missing"),
        (CHAT, chat({"file_data": "?"}), f"{file}.file_data", "is not base64"),
        (CHAT, chat({"file_data": url}), f"{file}.file_data", "is not base64"),
        (CHAT, chat(inline(PDF, "a\nb")), f"{file}.filename", "not printable"),
        (CHAT, chat(inline(b"\0", "a.bin")), file, "a.bin is neither text in UTF-8 nor a PDF"),
        (
            CHAT,
            chat(inline(PDF), inline(locked)),
            file.replace("content.0", "content.1"),
            "encrypted",
        ),
        (CHAT, chat(*[inline(b"")] * 65), "files of a request", "at most 64"),
        (RESPONSES, response({"file_id": "a"}), f"{item}.file_id", "files are not stored here"),
        (RESPONSES, response({"file_url": url}), f"{item}.file_url", "fetches no URLs"),
        (RESPONSES, response({**inline(PDF), "file_url": url}), item, "send one"),
        (RESPONSES, response({"file": {}}), f"{item}.file", "not a known field"),
        (RESPONSES, response(inline(pdf_of(SHOW_IMAGE))), item, "has no text, only images"),
        (MESSAGES, message(of_url), f"{block}.source.type", "fetches no URLs"),
        (MESSAGES, message(of_file), f"{block}.source.type", "files are not stored here"),
        (MESSAGES, message(of_content), f"{block}.source.content.0.type", "only text"),
        (MESSAGES, message({}), f"{block}.source", "is missing"),
        (MESSAGES, message(source("base64", "", "image/png")), f"{block}.source.media_type", ""),
    ]

    async def scenario(router: HttpRouter, client: httpx2.AsyncClient, prompts: Prompts) -> None:
        answers = await asyncio.gather(*(client.post(path, json=body) for path, body, *_ in cases))
        for (_, _, field, reason), answer in zip(cases, answers, strict=True):
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field)
            assert reason in error["message"]
        assert not prompts.seen

    with_router(scenario)


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat(*[inline(BOMB)] * 32)), (f"{MESSAGES}/count_tokens", None)]
)
def test_a_hostile_file_delays_no_other_request_and_ends_with_its_client(
    path: str, body: dict[str, Any] | None
) -> None:
    if body is None:
        bomb = source("base64", base64.b64encode(BOMB).decode(), "application/pdf")
        body = message(*[bomb] * 32)
        del body["max_tokens"]

    async def scenario(router: HttpRouter, client: httpx2.AsyncClient, prompts: Prompts) -> None:
        hostile = asyncio.ensure_future(client.post(path, json=body))
        process = await confined_process_of(os.getpid())
        bystander = await client.post(CHAT, json=chat(inline(b"hi", "a.txt")))
        assert bystander.status_code == 200
        assert not hostile.done()
        hostile.cancel()
        await end_of(process)
        await router.pipeline.drain()
        refused = await client.post(CHAT, json=chat(inline(PDF)))
        assert refused.status_code == 503

    with_router(scenario)
