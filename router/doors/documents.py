"""Documents in the messages of requests, which are read before the prompt is tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from sys import getsizeof

from baton.router.documents.document import MAX_DOCUMENTS
from baton.router.doors.openai.request.parsed_request import ParsedRequest
from baton.router.http.bodies import ReceivedBody
from baton.router.http.exchange import ReceivedRequest
from baton.router.input_processing.limits import check_count
from baton.router.parts import Content, Document
from baton.router.pipeline import Pipeline
from baton.router.values import ChatPrompt, Prompt


async def read_prompt(prompt: Prompt, pipeline: Pipeline, body: ReceivedBody) -> Prompt:
    """Read the documents of a prompt. Raises InvalidRequest, UnsupportedInput and QueueFull."""
    documents = documents_in(prompt)
    if not documents or not isinstance(prompt, ChatPrompt):
        return prompt
    check_count("files of a request", len(documents), MAX_DOCUMENTS)
    body.hold_more(sum(getsizeof(document.content) for document in documents))
    read = await pipeline.documents.read(documents, body.client)
    body.hold_more(sum(getsizeof(document.content) for document in read))
    return with_documents(prompt, read)


async def read_documents(
    parsed: ParsedRequest, pipeline: Pipeline, request: ReceivedRequest
) -> ParsedRequest:
    """Read the documents of a request, whose answer gets the warnings.

    Raises as `read_prompt` does, and Draining and RequestIdInUse.
    """
    prompt = parsed.calls[0].prompt
    if not documents_in(prompt):
        return parsed
    with pipeline.accept(request.id):  # a router that stops waits for it, or refuses it at once
        prompt = await read_prompt(prompt, pipeline, request.body)
    warnings = [text for document in documents_in(prompt) for text in document.warnings]
    request.scope.note_documents_read(warnings)
    return replace(parsed, calls=tuple(replace(call, prompt=prompt) for call in parsed.calls))


def documents_in(prompt: Prompt) -> list[Document]:
    if not isinstance(prompt, ChatPrompt):
        return []
    contents = [each.content for each in prompt.messages if not isinstance(each.content, str)]
    return [part for parts in contents for part in parts if isinstance(part, Document)]


def with_documents(prompt: ChatPrompt, documents: Sequence[Document]) -> ChatPrompt:
    """Replace the documents of a prompt by others, in order."""
    rest = iter(documents)

    def read(content: Content) -> Content:
        if isinstance(content, str):
            return content
        return tuple(next(rest) if isinstance(part, Document) else part for part in content)

    messages = [replace(each, content=read(each.content)) for each in prompt.messages]
    return replace(prompt, messages=tuple(messages))
