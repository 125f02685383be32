"""Constraints and random draws of a step: their input, and the Protocol of implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.runner.device.step_memory import NEW_MEMORY, Memory
from baton.engine.runner.model.ops import Ops, Peaks
from baton.engine.runner.model.pass_layout import TokenRun

FindPeaks = Callable[[Tensor], Peaks]


class SampledRows(NamedTuple):
    """Rows of a step. Each row of logits belongs to one run."""

    runs: Sequence[TokenRun]
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    device: torch.device
    find_peaks: FindPeaks = Ops().find_peaks
    memory: Memory = NEW_MEMORY  # of results


class BestTokens(NamedTuple):
    """Argmax of constrained rows of logits."""

    token_ids: Tensor
    are_empty: Tensor  # all tokens of a row are forbidden


class SamplingPass(Protocol):
    """Sampling of one step, whose parameters are on the device. Nothing is read from there."""

    def constrain(self, logits: Tensor) -> Tensor:
        """Apply grammar masks, allowed and banned tokens, min_tokens, logit bias and penalties.

        Returns a modified copy if any row has them or a logits processor, else the logits.
        """
        ...

    def choose(self, scores: Tensor) -> BestTokens:
        """Return the argmax of constrained logits."""
        ...

    def draw(self, scores: Tensor, token_ids: Tensor) -> None:
        """Replace the argmax of each random row by a draw. `scores`: constrained logits.

        The token of a row that is not finite, or forbids all tokens, is undefined.
        """
        ...
