"""Documents and images in messages, which are read before the prompt is tokenised."""

from __future__ import annotations

from dataclasses import replace

from baton.router.doors.openai.request.parsed_request import ParsedRequest
from baton.router.http.exchange import ReceivedRequest
from baton.router.parts import Document
from baton.router.pipeline import Pipeline
from baton.router.values import ChatPrompt, Prompt


async def read_files(
    parsed: ParsedRequest, pipeline: Pipeline, request: ReceivedRequest
) -> ParsedRequest:
    """Read the files of a request, whose answer gets the warnings about its documents.

    Raises as `Pipeline.read_files` does, and Draining and RequestIdInUse.
    """
    call, scope, body = parsed.calls[0], request.scope, request.body
    if not isinstance(call.prompt, ChatPrompt) or not call.prompt.has_parts:
        return parsed
    with pipeline.accept(request.id):  # a router that stops waits for it, or refuses it at once
        prompt = await pipeline.read_files(
            call.prompt, call.model, body.client, body.hold_more, scope.context.trace.image_work
        )
    if documents := documents_in(prompt):
        scope.note_documents_read([text for each in documents for text in each.warnings])
    return replace(parsed, calls=tuple(replace(each, prompt=prompt) for each in parsed.calls))


def documents_in(prompt: Prompt) -> list[Document]:
    """Return the documents that have been read."""
    return prompt.parts(Document) if isinstance(prompt, ChatPrompt) else []
