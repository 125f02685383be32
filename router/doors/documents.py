"""Documents in the bodies of requests, which become texts before a request is parsed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from sys import getsizeof
from typing import Any

from baton.router.documents.document import MAX_DOCUMENTS, DocumentPart
from baton.router.http.bodies import ReceivedBody
from baton.router.http.exchange import ReceivedRequest
from baton.router.input_processing.limits import check_count
from baton.router.pipeline import Pipeline

# Finds the documents in the fields of a body. Raises InvalidRequest and UnsupportedInput.
FindDocuments = Callable[[Mapping[str, Any]], Iterator[DocumentPart]]


async def put_texts(
    find: FindDocuments,
    fields: Mapping[str, Any],
    pipeline: Pipeline,
    body: ReceivedBody,
) -> list[str] | None:
    """Replace the documents in the fields by parts with their texts, and return warnings.

    Returns None if there are no documents. Raises InvalidRequest, UnsupportedInput and QueueFull.
    """
    parts = await body.run(partial(_find_all, find, fields))
    if not parts:
        return None
    body.hold_more(sum(getsizeof(part.document.content) for part in parts))
    read = await pipeline.documents.read([part.document for part in parts], body.client)
    body.hold_more(sum(getsizeof(each.text) for each in read))
    for part, each in zip(parts, read, strict=True):
        part.put_text(each.text)
    warnings = [[*part.warnings, each.warning] for part, each in zip(parts, read, strict=True)]
    return [warning for some in warnings for warning in some if warning]


async def read_documents(
    find: FindDocuments, fields: Mapping[str, Any], pipeline: Pipeline, request: ReceivedRequest
) -> None:
    """Replace the documents in the fields of a request, whose answer gets the warnings.

    Raises as `put_texts` does, and Draining and RequestIdInUse.
    """
    with pipeline.accept(request.id):  # a router that stops waits for it, or refuses it at once
        warnings = await put_texts(find, fields, pipeline, request.body)
    if warnings is not None:
        request.scope.note_documents_read(warnings)


def _find_all(find: FindDocuments, fields: Mapping[str, Any]) -> list[DocumentPart]:
    parts: list[DocumentPart] = []
    for part in find(fields):
        parts.append(part)
        check_count("files of a request", len(parts), MAX_DOCUMENTS)
    return parts
