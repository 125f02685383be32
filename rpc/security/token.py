"""Bearer tokens: sending by clients and checking by servers. Tokens are never logged."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.errors import InvalidConfig
from baton.rpc.errors import Unauthenticated

HEADER = "authorization"
SCHEME = "bearer"


def authorization(token: str) -> tuple[str, str]:
    """Return the metadata entry that carries the token."""
    return HEADER, f"Bearer {token}"


def check_token(token: str, where: str) -> None:
    """Raises InvalidConfig, which does not quote the token."""
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise InvalidConfig(f"{where} must be of visible ASCII characters, without spaces")


def read_tokens(path: Path, option: str = "--token-file") -> tuple[str, ...]:
    """Read one token per line, without empty lines. Raises InvalidConfig."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidConfig(
            f"{option} {path} cannot be read: {reason}; give one token in a line"
        ) from error
    tokens = tuple(line.strip() for line in lines if line.strip())
    if not tokens:
        raise InvalidConfig(f"{option} {path} is empty; write one token in a line")
    for token in tokens:
        check_token(token, f"every token of {option} {path}")
    return tokens


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    tokens: tuple[str, ...] = field(repr=False)

    def check(self, shown: str | None) -> None:
        """Raises Unauthenticated. Its duration does not depend on where a wrong token differs."""
        if shown is None:
            raise Unauthenticated(
                "no token was sent; send one as the metadata `authorization: Bearer TOKEN` "
                "(--token-file, or token=… in Python)"
            )
        if not self.accepts(shown):
            raise Unauthenticated("the token is not one that this server takes; ask for another")

    def accepts(self, shown: str | None) -> bool:
        """Return whether this is one of the tokens, in a time that does not depend on which."""
        scheme, _, token = (shown or "").partition(" ")
        sent = token.strip().encode()
        matches = [hmac.compare_digest(sent, accepted.encode()) for accepted in self.tokens]
        return scheme.lower() == SCHEME and any(matches)

    def and_those_of(self, other: AcceptedTokens | None) -> AcceptedTokens:
        return self if other is None else AcceptedTokens(self.tokens + other.tokens)
