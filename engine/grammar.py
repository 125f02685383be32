"""What a grammar is to the engine: it tells which tokens may follow those written so far.

Where a matcher stands follows from the answer's tokens alone. Nothing else of it is ever carried:
after a hand-off, a preemption or a migration a new one is told the tokens that are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]  # one bit for each token of the vocabulary, the lowest bit first


class Matcher(Protocol):
    """One answer's place in its grammar. Raises InvalidRequest once it can be followed no more."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were written, in this order."""
        ...

    def fill(self, allowed: Bits) -> None:
        """Set the bits of the tokens that may come next, and no others.

        Never none: an answer that is whole may still end.
        """
        ...


class Grammar(Protocol):
    """Compiled once, followed by many answers at a time."""

    def matcher(self) -> Matcher:
        """At the beginning of an answer."""
        ...
