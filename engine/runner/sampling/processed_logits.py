"""Logits after all sampling settings, for `logprobs-mode processed_logprobs`.

Greedy rows have the constrained logits, as in vLLM. Random rows also have their temperature, min-p,
top-k and top-p; tokens that cannot be drawn have -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.sampling.torch_sampling import Draw


class ProcessedLogits(NamedTuple):
    """Filters of a step's random rows, over the whole vocabulary."""

    draw: Draw | None

    @classmethod
    def of(
        cls, runs: Sequence[TokenRun], vocab_size: int, inputs: StepInputs
    ) -> ProcessedLogits | None:
        """Put the parameters. Returns None if no row requests logprobs."""
        if all(run.row.sampling.logprobs is None for run in runs):
            return None
        indices = [
            index
            for index, run in enumerate(runs)
            if run.row.sampling.logprobs is not None and not run.row.sampling.is_greedy
        ]
        return cls(Draw.of(vocab_size, indices, runs, inputs) if indices else None)

    def compute(self, scores: Tensor) -> Tensor:
        """Return processed rows of constrained logits, which are not modified."""
        if self.draw is None:
            return scores
        filtered = self.draw.filter(scores)
        if self.draw.rows is None:
            return filtered
        processed = scores.clone()
        processed[self.draw.rows] = filtered
        return processed
