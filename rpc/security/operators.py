"""Right to operators' calls, such as resets of caches, which affect all clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from baton.core.options import SECURITY, Option
from baton.rpc.errors import NotAnOperator
from baton.rpc.security.token import AcceptedTokens, authorization, read_tokens

OPTION = "--operator-token-file"


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
