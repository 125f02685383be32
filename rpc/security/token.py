"""Bearer tokens of clients and operators: sending and checking. Tokens are never logged."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from baton.core.errors import InvalidConfig
from baton.core.options import SECURITY, Option
from baton.rpc.errors import NotAnOperator, Unauthenticated

HEADER = "authorization"
SCHEME = "bearer"
OPTION = "--operator-token-file"


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


def read_operator_tokens(path: Path | None) -> AcceptedTokens | None:
    """Raises InvalidConfig."""
    return None if path is None else AcceptedTokens(read_tokens(path, OPTION))


OperatorTokens = Annotated[
    AcceptedTokens | None,
    Option(
        "File of operators' tokens, one per line, which resets, drains and changes of adapters "
        "require. Router and nodes need the same file to reset tiers that nodes share, and for "
        "adapters.",
        SECURITY,
        name="operator_token_file",
        kind=Path | None,
        parse=read_operator_tokens,
    ),
]


@dataclass(frozen=True, slots=True)
class Operators:
    """Operators of a server, who have tokens of their own."""

    tokens: AcceptedTokens | None = None  # None: there are no operators
    # Without operators: calls that affect nothing but this cluster's own memory are for everyone.
    is_open: bool = True

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Authorization of this server's own calls of other servers with the same operators."""
        return () if self.tokens is None else (authorization(self.tokens.tokens[0]),)

    def is_one(self, shown: str | None) -> bool:
        """Return whether the authorization of a call is an operator's."""
        return self.tokens is not None and self.tokens.accepts(shown)

    def check(self, shown: str | None) -> None:
        """Raises NotAnOperator if the call is not for the sender of this authorization."""
        if self.tokens is None and not self.is_open:
            raise NotAnOperator(
                f"no client may do this; start the server with {OPTION} and send one of its tokens"
            )
        if self.tokens is not None and not self.tokens.accepts(shown):
            raise NotAnOperator(
                f"this call is for operators; send a token of the server's {OPTION} (the same "
                "option of the command, or as `authorization: Bearer TOKEN`)"
            )


NO_OPERATORS = Operators()
