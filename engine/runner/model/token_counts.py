"""Distinct tokens of a row and their numbers among its outputs, counted as the tokens come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class TokenCounts:
    """Counts of one row. A step costs as much as the tokens that it adds, whatever the history.

    Drafts are counted like outputs, and taken back once others have replaced them. The prompt is
    counted when the row is first sampled.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._index_by_token: dict[int, int] | None = None
        self._num_in_prompt = 0
        self._outputs: list[int] = []  # that are counted
        # [2, capacity]: token ids and their numbers among the outputs.
        self._table: Ints = np.zeros((2, 0), dtype=np.int64)

    def count(self, known_tokens: Ints) -> tuple[Ints, Ints]:
        """Return the distinct tokens of prompt and outputs, and how often each is an output."""
        index_by_token = self._index_by_token
        if index_by_token is None:
            index_by_token = self._count_prompt(known_tokens[: self._num_prompt_tokens])
        outputs = known_tokens[self._num_prompt_tokens :]
        # A step replaces at most the token after those drafts that it accepts.
        while self._outputs and not self._is_counted(outputs):
            self._take_back(index_by_token)
        self._add(outputs[len(self._outputs) :].tolist(), index_by_token)
        token_ids, counts = self._table[:, : len(index_by_token)].copy()
        return token_ids, counts

    def _count_prompt(self, prompt: Ints) -> dict[int, int]:
        token_ids = np.unique(prompt)
        self._table = np.stack((token_ids, np.zeros_like(token_ids)))
        self._num_in_prompt = len(token_ids)
        self._index_by_token = dict(zip(token_ids.tolist(), range(len(token_ids)), strict=True))
        return self._index_by_token

    def _is_counted(self, outputs: Ints) -> bool:
        """Return whether what is counted is the beginning of the outputs."""
        num_counted = len(self._outputs)
        return num_counted <= len(outputs) and self._outputs[-1] == outputs[num_counted - 1]

    def _add(self, token_ids: Sequence[int], index_by_token: dict[int, int]) -> None:
        for token_id in token_ids:
            index = index_by_token.setdefault(token_id, len(index_by_token))
            if index == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.zeros((2, index + 64), np.int64)), 1)
            self._table[:, index] = token_id, self._table[1, index] + 1
        self._outputs += token_ids

    def _take_back(self, index_by_token: dict[int, int]) -> None:
        token_id = self._outputs.pop()
        index = index_by_token[token_id]
        self._table[1, index] -= 1
        # The newest entry: those of later tokens were taken back before.
        if index >= self._num_in_prompt and not self._table[1, index]:
            del index_by_token[token_id]
