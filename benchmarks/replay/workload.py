"""Prompts of a replay: recorded blocks as tokens of the served model. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from baton.bench.load import random_tokens
from baton.core.errors import InvalidConfig
from benchmarks.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Scaling:
    """Sizes of the replayed requests."""

    recorded_block_tokens: int
    block_tokens: int  # tokens that replay a recorded block
    max_output_tokens: int | None = None
    max_sequence_len: int | None = None  # longer prompts are truncated

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise InvalidConfig(f"block_tokens is {self.block_tokens}; it must be at least 1")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidConfig("max_output_tokens must be at least 1")

    def num_tokens(self, num_recorded: int) -> int:
        """Return the scaled number of tokens, at least 1."""
        whole, rest = divmod(num_recorded, self.recorded_block_tokens)
        part = rest * self.block_tokens // self.recorded_block_tokens
        return max(1, whole * self.block_tokens + part)

    def num_output_tokens(self, num_recorded: int) -> int:
        num_tokens = self.num_tokens(num_recorded)
        for limit in (self.max_output_tokens, (self.max_sequence_len or num_tokens + 1) - 1):
            num_tokens = num_tokens if limit is None else min(num_tokens, limit)
        return max(1, num_tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as it was sent, and the answer to it."""

    request: TraceRequest
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplayPrompt:
    token_ids: tuple[int, ...]
    num_output_tokens: int
    num_cut_tokens: int


@dataclass(slots=True)
class PromptBuilder:
    """Builds prompts. Blocks of the same name have the same tokens, which depend on the seed."""

    scaling: Scaling
    vocab_size: int
    seed: int = 0
    _tokens_by_block: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def build(
        self, number: int, request: TraceRequest, previous: Turn | None = None
    ) -> ReplayPrompt:
        """Return the prompt of a request. `previous`: the turn whose answer it continues."""
        num_output_tokens = self.scaling.num_output_tokens(request.num_output_tokens)
        token_ids = self._recorded(number, request)
        if previous is not None:
            known = self._continued(previous, request)
            token_ids = (known + token_ids[len(known) :])[: len(token_ids)]
        limit = len(token_ids)
        if self.scaling.max_sequence_len is not None:
            limit = max(1, min(limit, self.scaling.max_sequence_len - num_output_tokens))
        return ReplayPrompt(token_ids[:limit], num_output_tokens, len(token_ids) - limit)

    def _recorded(self, number: int, request: TraceRequest) -> tuple[int, ...]:
        """Return the tokens of the recorded blocks, and random ones after them."""
        blocks = [token for name in request.block_names for token in self._block(name)]
        num_own = self.scaling.num_tokens(request.num_prompt_tokens) - len(blocks)
        own = random_tokens(random.Random(f"{self.seed}/own/{number}"), self.vocab_size, num_own)
        return (*blocks, *own)

    def _block(self, name: str) -> tuple[int, ...]:
        if name not in self._tokens_by_block:
            draw = random.Random(f"{self.seed}/block/{name}")
            tokens = random_tokens(draw, self.vocab_size, self.scaling.block_tokens)
            self._tokens_by_block[name] = tokens
        return self._tokens_by_block[name]

    def _continued(self, previous: Turn, request: TraceRequest) -> tuple[int, ...]:
        """Return the tokens that a turn has in common with the previous turn and its answer.

        A turn that repeats all blocks of the previous prompt continues its answer. Otherwise the
        conversation was edited, and they have only the leading blocks in common.
        """
        num_shared = num_common(previous.request.block_names, request.block_names)
        if num_shared == len(previous.request.block_names):
            return previous.prompt + previous.answer
        return previous.prompt[: num_shared * self.scaling.block_tokens]


def num_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
