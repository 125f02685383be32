"""Linear layers: the Protocol of their implementations."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class HeadLinears(Protocol):
    """Linear layers of the same shape without biases, one for each head."""

    def __call__(self, heads: Tensor) -> Tensor:
        """[tokens, heads, columns] → [tokens, heads, rows]; as with `Linear`, row by row."""
        ...


class Linear(Protocol):
    """Linear layer, or embedding table, whose weight is in the layout of its implementation."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, rows]. An output row depends only on its own token."""
        ...

    def rows(self, row_ids: Tensor) -> Tensor:
        """Return rows of the weight, dequantized, as an embedding lookup does."""
        ...
