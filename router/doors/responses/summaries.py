"""Summaries in the items of compacted conversations. Pure."""

from __future__ import annotations

import base64
import binascii

from baton.core.errors import InvalidRequest

PREFIX = "baton:"  # of the content of items that are made here
SUMMARY = "Summary of the conversation before this message:\n{}"


def content_of(summary: str) -> str:
    """Return a summary as the content of an item. It is not encrypted."""
    return PREFIX + base64.b64encode(summary.encode()).decode()


def read_summary(content: str, where: str) -> str:
    """Return the summary as a message's text. Raises InvalidRequest."""
    try:
        if not content.startswith(PREFIX):
            raise ValueError
        text = base64.b64decode(content.removeprefix(PREFIX), validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest(
            f"{where} was not made by this service, so it cannot be read: send the conversation "
            "itself",
            where,
        ) from None
    return SUMMARY.format(text)
