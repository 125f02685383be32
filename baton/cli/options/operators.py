"""Option of the commands that are for operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from baton.core.options import SECURITY, Option
from baton.rpc.security.operators import read_operator_tokens

OperatorTokenFile = Annotated[
    Path | None,
    Option(
        "File with an operator's token in its first line, as the cluster's router and nodes have "
        "it.",
        SECURITY,
    ),
]


def operator_token(file: Path | None) -> str | None:
    """Return the token to send. Raises InvalidConfig."""
    operators = read_operator_tokens(file)
    return None if operators is None else operators.tokens[0]
