"""Interface of compiled grammars: the tokens that can follow an output.

The state of a matcher depends only on the tokens of the output, so it is never transferred: after
a hand-off, preemption or migration, a new matcher is advanced over the existing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]  # token bitmask: one bit per token of the vocabulary, lowest bit first


def num_words(vocab_size: int) -> int:
    """Return the length of a token bitmask, in 32-bit words."""
    return -(-vocab_size // 32)


class Matcher(Protocol):
    """Parser state of one output. Methods raise InvalidRequest if the grammar cannot continue."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance over output tokens, in order."""
        ...

    def try_advance(self, token_id: int) -> bool:
        """Advance over a drafted token. Returns False, and stays, if it cannot come next.

        The EOS token is never advanced over.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Return to the state before the last tokens: drafts that were rejected."""
        ...

    def fill(self, allowed: Bits) -> None:
        """Fill the bitmask with the tokens that can follow.

        At least one bit is set: a complete output allows the EOS token.
        """
        ...


class Grammar(Protocol):
    """Compiled grammar, shared by any number of concurrent outputs."""

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of an output."""
        ...
