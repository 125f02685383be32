"""Section of an answer in front of its structured output, in which a model reasons."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import InvalidRequest

FIELD = "reasoning"
MAX_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ReasoningSection:
    """Structured output begins after `end_token_ids`. Until then, any text may be generated."""

    end_token_ids: tuple[int, ...]
    # First token of an answer with reasoning: any other begins the structured output. None: the
    # prompt has begun the reasoning.
    begin_token_id: int | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.end_token_ids) <= MAX_END_TOKENS:
            raise InvalidRequest(
                f"{FIELD}.end_token_ids must have 1 to {MAX_END_TOKENS} tokens; it has "
                f"{len(self.end_token_ids)}",
                FIELD,
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        begin = () if self.begin_token_id is None else (self.begin_token_id,)
        return (*begin, *self.end_token_ids)
