"""Calls that an end token, a stop string or `max_tokens` cuts, in each API, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.core.output import Finish, FinishReason, Served
from baton.core.sampling import NO_SAMPLING_DEFAULTS
from baton.router.doors.messages.parsed_message import message_from
from baton.router.doors.messages.response import MessageResponse
from baton.router.doors.openai.request.parsed_request import ModelContext, chat_completion_from
from baton.router.doors.openai.response.choices import ChatChoice, join_chunks
from baton.router.doors.responses.parsed_response import NO_HISTORY, response_from
from baton.router.doors.responses.response_object import ResponseObject
from baton.router.http.json_encoding import Json, as_json
from baton.router.input_processing.tokenization import TextBoundary, placeholder_text
from baton.router.text_events.events import EventReader, fold
from baton.router.values import AnswerPart, Parsing, TokenChunk
from tests.support.written_calls import WRITERS

SERVED = Served("p", "d", True, "", 0, 0, "", 0, 0, 1)
END_TOKEN = Finish(FinishReason.STOP, 5, 3, 0, 1, 1, 2, SERVED)
STOP_STRING = replace(END_TOKEN, stop_string="END")
MAX_TOKENS = replace(END_TOKEN, reason=FinishReason.LENGTH)
RM = ("rm", {"path": "/tmp", "only": "*.log"})
PARAMETERS = {"type": "object", "properties": {name: {"type": "string"} for name in RM[1]}}
FUNCTION = {"name": "rm", "parameters": PARAMETERS}
USER = [{"role": "user", "content": "hi"}]
WRITTEN: Mapping[str, str] = {
    "hermes": WRITERS["hermes"]("So.", [RM]),
    "qwen3_xml": WRITERS["qwen3_xml"]("So.", [RM]),
    "required": json.dumps([{"name": "rm", "arguments": RM[1]}]),
}
# Calls that an API gives a program to run, the text, and how the answer ended.
Answer = tuple[list[tuple[str, Any]], str, str]


def context_of(form: str) -> ModelContext:
    return ModelContext(NO_SAMPLING_DEFAULTS, 512, Parsing(form if form in WRITERS else "hermes"))


def chunks_of(text: str) -> list[TokenChunk]:
    half = len(text) // 2
    return [TokenChunk(0, (1,), text[:half]), TokenChunk(1, (2,), text[half:])]


def chat(form: str, chunks: Sequence[TokenChunk], end: Finish) -> tuple[Answer, Answer]:
    choice = "required" if form == "required" else "auto"
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": USER, "tools": tools, "tool_choice": choice, "stream": True}
    options = chat_completion_from(body, "id", context_of(form)).options
    streamed, whole = (ChatChoice(0, options, placeholder_text) for _ in range(2))
    reader = EventReader(options.text_format.parser, 1)
    parts = [reader.read(0, chunk) for chunk in chunks]
    sent = [chunk for chunk in map(streamed.chunk, parts, chunks) if chunk is not None]
    parts.append(reader.read(0, end))
    sent.append(streamed.last_chunk(parts[-1], end))
    text = fold([event for part in parts for event in part])
    choices = ({**sent[-1], "message": joined(sent)}, whole.whole(text, join_chunks(chunks), end))
    return answer_of_chat(choices[0]), answer_of_chat(choices[1])


def joined(choices: Sequence[Json]) -> Json:
    """Return the message that a client assembles from the chunks of a stream."""
    deltas = [choice["delta"] for choice in choices]
    calls: list[Json] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if call["index"] == len(calls):
            calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
        calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"content": "".join(delta.get("content", "") for delta in deltas), "tool_calls": calls}


def answer_of_chat(choice: Json) -> Answer:
    message, reason = choice["message"], choice["finish_reason"]
    functions = [each["function"] for each in message.get("tool_calls", ())]
    if reason != "tool_calls":
        functions = []
    calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
    return calls, message["content"] or "", reason


def message(form: str, chunks: Sequence[TokenChunk], end: Finish) -> tuple[Answer, Answer]:
    choice = {"tool_choice": {"type": "any"}} if form == "required" else {}
    tools = [{"name": "rm", "input_schema": PARAMETERS}]
    body = {"messages": USER, "max_tokens": 99, "tools": tools, "stream": True, **choice}
    parsed = message_from(body, "id", context_of(form))
    response = MessageResponse(parsed, "id", "tiny", TextBoundary())
    parts: list[AnswerPart] = [*chunks, end]
    events = [event for part in parts for event in response.content_events(part)]
    whole = response.whole(events, end)
    blocks = [each["content_block"] for each in events if "content_block" in each]
    for event in events:
        if event["type"] == "content_block_delta":
            block, (_, text) = blocks[event["index"]], event["delta"].values()
            block["text"] = block.get("text", "") + text
    # A client runs a call once its block has stopped.
    stopped = [blocks[each["index"]] for each in events if each["type"] == "content_block_stop"]
    calls = [(each["name"], json.loads(each["text"])) for each in stopped if "input" in each]
    text = "".join(each["text"] for each in blocks if each["type"] == "text")
    content = whole["content"]
    in_whole = [(each["name"], each["input"]) for each in content if each["type"] == "tool_use"]
    whole_text = "".join(each.get("text", "") for each in content)
    reason = whole["stop_reason"]
    return (calls, text, reason), (in_whole, whole_text, reason)


def response(form: str, chunks: Sequence[TokenChunk], end: Finish) -> tuple[Answer, Answer]:
    choice = "required" if form == "required" else "auto"
    tools = [{"type": "function", **FUNCTION}]
    body = {"input": USER, "tools": tools, "tool_choice": choice, "stream": True}
    parsed = response_from(body, NO_HISTORY, "id", context_of(form))
    found = ResponseObject(parsed, "resp_id", 0, "tiny", TextBoundary())
    parts: list[AnswerPart] = [*chunks, end]
    events = [event for part in parts for event in found.events(part)]
    whole = found.whole(end, 1)
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    added = [each for each in events if each["type"] == "response.output_item.added"]
    # OpenAI's client refuses a completed response with items that are not done.
    assert len(added) == len(done) or whole["status"] == "incomplete"
    # It can be continued by its id.
    response_from({"input": "?"}, as_json(found.items), "id", context_of(form))
    return answer_of_items(done, whole), answer_of_items(whole["output"], whole)


def answer_of_items(items: Sequence[Json], whole: Json) -> Answer:
    called = [each for each in items if each["type"] == "function_call"]
    assert all(each["status"] == "completed" for each in called)
    calls = [(each["name"], json.loads(each["arguments"])) for each in called]
    texts = [part["text"] for each in items for part in each.get("content", ())]
    return calls, "".join(texts), whole["status"]


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("answers", [chat, message, response])
@pytest.mark.parametrize("end", [END_TOKEN, STOP_STRING, MAX_TOKENS])
def test_a_call_that_is_cut_anywhere_is_not_to_run(form: str, answers: Any, end: Finish) -> None:
    text = WRITTEN[form]

    for place in range(text.index("rm"), len(text) + 1):
        parts = text[: place // 2], text[place // 2 : place]
        chunks = [TokenChunk(index, (index,), part) for index, part in enumerate(parts)]
        streamed, whole = answers(form, chunks, end)

        calls, _, reason = streamed
        assert streamed == whole
        assert calls == [RM] or (not calls and reason not in ("tool_calls", "tool_use"))
