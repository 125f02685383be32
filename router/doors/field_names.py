"""Names of fields in errors, for APIs whose requests are translated to chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.core.errors import InvalidRequest
from baton.rpc.errors import UnsupportedInput

Renames = Sequence[tuple[re.Pattern[str], str]]


@contextmanager
def renaming_fields(renames: Renames) -> Iterator[None]:
    """Rewrite errors that name a field of a chat to name the field that the client sent."""
    try:
        yield
    except (InvalidRequest, UnsupportedInput) as refusal:
        message, field = _renamed(str(refusal), renames), _renamed(refusal.field or "", renames)
        if (message, field) == (str(refusal), refusal.field or ""):
            raise
        raise type(refusal)(message, field or None) from None


def _renamed(text: str, renames: Renames) -> str:
    for pattern, name in renames:
        text = pattern.sub(name, text, count=1)
    return text
