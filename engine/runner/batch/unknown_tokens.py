"""Tokens that a pass reads before the host has them: sampled by the pass before, on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.engine.plan import RunResult
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.model.pass_layout import Ints, TokenRun


class SampledTokens(NamedTuple):
    """Tokens that a pass samples. Those of rows that fail are any of the vocabulary."""

    runs: Sequence[TokenRun]
    token_ids: Tensor  # by run, on the device


@dataclass(frozen=True, slots=True)
class UnknownTokens:
    """Tokens of a step that only the device has. Each is the only one of its row in the step."""

    runs: Sequence[TokenRun]  # of the step, whose last token is unknown
    places: Ints  # of the tokens in the flat batch
    sources: Ints  # index of each among `sampled`
    sampled: Tensor  # int64, by the runs of the pass before
    receive: Callable[[], RunResult]  # waits for that pass, after which the batch has the tokens

    @classmethod
    def of(
        cls,
        runs: Sequence[TokenRun],
        before: SampledTokens,
        receive: Callable[[], RunResult],
    ) -> UnknownTokens | None:
        """Return the tokens that single-token runs, at the front of a step, take from `before`."""
        index_by_slot = {run.slot: index for index, run in enumerate(before.runs)}
        found = [
            (place, index)
            for place, run in enumerate(runs)
            if (index := index_by_slot.get(run.slot)) is not None
            and before.runs[index].row is run.row  # not a later one in its slot
        ]
        if not found:
            return None
        places, sources = np.array(found, dtype=np.int64).T
        unknown = [runs[place] for place, _ in found]
        return cls(unknown, places, sources, before.token_ids, receive)

    def failed_rows(self) -> Collection[RequestId]:
        """Wait for the pass before, and return the rows that got no token from it."""
        failures = self.receive().failures
        if not failures:
            return ()
        return [run.row.request_id for run in self.runs if run.row.request_id in failures]


class TokenGatherer:
    """Writes unknown tokens into the inputs of a pass, without an allocation in each step."""

    def __init__(self, device: torch.device) -> None:
        self._gathered = torch.empty(0, dtype=torch.int64, device=device)

    def put(
        self, unknown: UnknownTokens, token_ids: Tensor, inputs: StepInputs
    ) -> Callable[[], None]:
        """Put the indices. Returns the function that launches the writes into `token_ids`."""
        places, sources = inputs.put(unknown.places), inputs.put(unknown.sources)
        if len(places) > len(self._gathered):
            self._gathered = self._gathered.new_empty(2 * len(places))
        gathered = self._gathered[: len(places)]

        def launch() -> None:
            torch.index_select(unknown.sampled, 0, sources, out=gathered)
            token_ids.index_copy_(0, places, gathered)

        return launch
