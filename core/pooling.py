"""Pooling: how a model turns the hidden states of a text into vectors. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolingKind(StrEnum):
    """Tokens whose hidden states become vectors."""

    LAST = "last"
    MEAN = "mean"  # of all tokens
    CLS = "cls"  # the first token
    TOKENS = "tokens"  # each token has a vector, and the text has none


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Linear layer that pooled hidden states pass. Its tensors are in a folder of their own."""

    folder: str  # in the model's folder; empty: that one
    num_inputs: int
    num_outputs: int
    has_bias: bool = False
    has_tanh: bool = False


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of a model."""

    kind: PoolingKind
    normalizes: bool = True  # vectors have length one
    num_labels: int = 0  # the vector has a score for each label; 0: it is an embedding
    gives_logits: bool = False  # scores are logits instead of probabilities
    dense: tuple[DenseLayer, ...] = ()

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether hidden states of other tokens than the last one are needed.

        They exist only for tokens that are computed, and not for those of a cached prefix.
        """
        return self.kind is not PoolingKind.LAST
