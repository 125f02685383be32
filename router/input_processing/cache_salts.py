"""Prefix-cache salts. With authentication, a salt is bound to the client's token, so tenants never
share KV. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from rpc.security.token import HEADER


def token_digest(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the hash of the client's token; empty without a token."""
    header = next((value for key, value in metadata if key == HEADER), "")
    token = (header.decode() if isinstance(header, bytes) else header).partition(" ")[2].strip()
    return hashlib.sha256(token.encode()).hexdigest() if token else ""


def bind_salt(salt: str, owner: str) -> str:
    """Bind a salt to its owner. Requests without a salt share KV with all others without one."""
    return f"{owner}:{salt}" if salt and owner else salt
