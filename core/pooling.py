"""Pooling: how a model turns the hidden states of a text into one vector. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolingKind(StrEnum):
    """Tokens whose hidden states become the vector."""

    LAST = "last"
    MEAN = "mean"  # of all tokens
    CLS = "cls"  # the first token


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of a model."""

    kind: PoolingKind
    normalizes: bool = True  # vectors have length one
    num_labels: int = 0  # the vector has a score for each label; 0: it is an embedding
    gives_logits: bool = False  # scores are logits instead of probabilities

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether hidden states of other tokens than the last one are needed.

        They exist only for tokens that are computed, and not for those of a cached prefix.
        """
        return self.kind is not PoolingKind.LAST
