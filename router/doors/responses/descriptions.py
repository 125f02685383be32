"""Descriptions of paths and bodies of the Responses API for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from baton.router.doors.responses.bodies import ResponsesBody
from baton.router.doors.responses.compaction import CompactionBody
from baton.router.http.openapi import Described

DESCRIPTIONS: Mapping[str, Described] = {
    "/v1/responses": Described("Answer a list of items", (ResponsesBody,)),
    "/v1/responses/compact": Described("Summarize a conversation", (CompactionBody,)),
    "/v1/responses/{response_id}": Described("Return or delete a stored response"),
}
