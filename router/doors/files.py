"""Documents and images in messages, which are read before the prompt is tokenised."""

from __future__ import annotations

from dataclasses import replace
from sys import getsizeof

from baton.core.ids import ModelVariant
from baton.router.documents.document import MAX_DOCUMENTS
from baton.router.doors.openai.request.parsed_request import ParsedRequest
from baton.router.http.bodies import ReceivedBody
from baton.router.http.exchange import ReceivedRequest
from baton.router.input_processing.limits import check_count
from baton.router.pictures.plan import ImageFile
from baton.router.pictures.reader import ImageTrace, untraced
from baton.router.pipeline import Pipeline
from baton.router.values import ChatPrompt, Content, Document, Part, Prompt


async def read_prompt(
    prompt: Prompt,
    pipeline: Pipeline,
    body: ReceivedBody,
    model: ModelVariant,
    trace: ImageTrace = untraced,
) -> Prompt:
    """Read the documents and images of a prompt.

    Raises InvalidRequest, UnsupportedInput, QueueFull, UnknownModel and NoNodes.
    """
    if not isinstance(prompt, ChatPrompt) or not _has_files(prompt):
        return prompt
    documents = documents_in(prompt)
    if documents:
        check_count("files of a request", len(documents), MAX_DOCUMENTS)
        body.hold_more(sum(getsizeof(document.content) for document in documents))
        takes_images = pipeline.image_format(model) is not None
        read = await pipeline.documents.read(documents, body.client, shows_pages=takes_images)
        body.hold_more(sum(getsizeof(document.content) for document in read))
        prompt = _with_pages(prompt.replaced(Document, read))
    return await pipeline.read_images(prompt, model, body.client, body.hold_more, trace)


async def read_files(
    parsed: ParsedRequest, pipeline: Pipeline, request: ReceivedRequest
) -> ParsedRequest:
    """Read the documents and images of a request, whose answer gets the warnings.

    Raises as `read_prompt` does, and Draining and RequestIdInUse.
    """
    call = parsed.calls[0]
    prompt = call.prompt
    if not isinstance(prompt, ChatPrompt) or not _has_files(prompt):
        return parsed
    with pipeline.accept(request.id):  # a router that stops waits for it, or refuses it at once
        trace = request.scope.image_work
        prompt = await read_prompt(prompt, pipeline, request.body, call.model, trace)
    warnings = [text for document in documents_in(prompt) for text in document.warnings]
    request.scope.note_documents_read(warnings)
    return replace(parsed, calls=tuple(replace(call, prompt=prompt) for call in parsed.calls))


def _has_files(prompt: ChatPrompt) -> bool:
    return any(not isinstance(message.content, str) for message in prompt.messages)


def documents_in(prompt: Prompt) -> list[Document]:
    if not isinstance(prompt, ChatPrompt):
        return []
    contents = [each.content for each in prompt.messages if not isinstance(each.content, str)]
    return [part for parts in contents for part in parts if isinstance(part, Document)]


def _with_pages(prompt: ChatPrompt) -> ChatPrompt:
    """Add the pages of documents without text as images, each document before its own."""

    def shown(part: Part) -> tuple[Part, ...]:
        if not isinstance(part, Document):
            return (part,)
        return (part, *(ImageFile(page, part.where) for page in part.pages))

    def read(content: Content) -> Content:
        if isinstance(content, str):
            return content
        return tuple(each for part in content for each in shown(part))

    messages = [replace(each, content=read(each.content)) for each in prompt.messages]
    return replace(prompt, messages=tuple(messages))
