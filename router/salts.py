"""Whose cached KV a request may hit: a salt is its client's own where clients show tokens. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from serving.token import HEADER


def owner_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Tells clients apart by their tokens, without telling the tokens; empty if none is shown."""
    shown = next((value for key, value in metadata if key == HEADER), "")
    token = (shown.decode() if isinstance(shown, bytes) else shown).partition(" ")[2].strip()
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def own_salt(salt: str, owner: str) -> str:
    """No other owner's salt is the same. Without a salt all share; without owners, salts do."""
    return f"{owner}:{salt}" if salt and owner else salt
