"""Messages of the first rank to the others: what to compute with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.runner.batch.encodings import MediaRows
from baton.engine.runner.model.pass_layout import Ints, PassLayout
from baton.engine.runner.passes.forward_passes import PassStep
from baton.engine.runner.state.state_tables import StateLayout


@dataclass(frozen=True, slots=True)
class SentStep:
    """Implements `PassStep` by values that can be sent."""

    token_ids: Ints
    layout: PassLayout
    sampled: Sequence[int]
    seen_lens: Ints
    max_len: int
    states: StateLayout | None

    @classmethod
    def of(cls, step: PassStep) -> SentStep:
        return cls(
            step.token_ids, step.layout, step.sampled, step.seen_lens, step.max_len, step.states
        )


@dataclass(frozen=True, slots=True)
class ComputePass:
    step: SentStep
    media: MediaRows | None
    grid: Ints | None
    needs_all: bool


@dataclass(frozen=True, slots=True)
class MultiplyHead:
    """Multiply rows, which follow, by the own part of the LM head."""

    num_rows: int
