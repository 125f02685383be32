"""Observation of engine steps: a step as a value, and the interface of its observers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baton.core.ids import RequestId
from baton.engine.plan import Plan
from baton.kv_transfer.records import TransferRecord
from baton.kv_transfer.types import KvReports


class StepRecord(NamedTuple):
    """One complete step."""

    plan: Plan
    # Begin of the step, and the ends of its parts: schedule, start orders, run, poll, update.
    times_s: tuple[float, ...]
    reports: KvReports
    transfers: tuple[TransferRecord, ...]  # ended since the last step


class StepObserver:
    """Base class of observers, whose methods do nothing.

    The engine thread calls them, in the order in which they are defined. They must not block. If
    a step ends the engine, the remaining calls are omitted.
    """

    def note_plan(self, plan: Plan, now_s: float) -> None:
        """Note a plan whose KV orders have started. Its pass follows."""

    def note_encoded(self, plan: Plan, encode_s: Mapping[RequestId, float], began_s: float) -> None:
        """Note how long the encoding of the plan's pictures took, before its pass."""

    def note_pass(self, plan: Plan, began_s: float, ended_s: float) -> None:
        """Note a pass that succeeded: of the step's plan, or of a part that is run again."""

    def note_end(self, step: StepRecord) -> None:
        """Note the end of a step, before its outputs are delivered."""
