"""Limit of the tiers' copies while requests decode."""

from __future__ import annotations

from baton.engine.plan import Plan
from baton.engine.step_observer import StepObserver
from baton.kv_transfer.tiers.copy_pace import CopyPace


class CopyPacing(StepObserver):
    """Reports to the tiers before each step whether requests decode in it."""

    def __init__(self, pace: CopyPace) -> None:
        self._pace = pace

    def note_plan(self, plan: Plan, now_s: float) -> None:
        num_tokens = sum(plan.num_scheduled_tokens.values())
        self._pace.set_decoding(num_tokens > plan.num_prompt_tokens)
