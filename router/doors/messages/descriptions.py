"""Descriptions of paths and bodies of the Messages API for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping

from baton.router.doors.messages.bodies import MessagesBody, TokenCountBody
from baton.router.http.openapi import Described

DESCRIPTIONS: Mapping[str, Described] = {
    "/v1/messages": Described("Answer a chat, as Anthropic's API does", (MessagesBody,)),
    "/v1/messages/count_tokens": Described("Count the tokens of a chat", (TokenCountBody,)),
}
