"""Passes that the runner has launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.core.ids import RequestId
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.batch.input_batch import Step
from baton.engine.runner.batch.unknown_tokens import SampledTokens
from baton.engine.runner.device.device import Device
from baton.engine.runner.drafting.drafter import DraftPass
from baton.engine.runner.drafting.spec_decoder import SpecDecoder
from baton.engine.runner.sampling.output_heads import HeadPass
from baton.kv_transfer.fence import Fence


@dataclass(slots=True, eq=False)
class PendingPass:
    """Implements `Pending`. Its result is computed once, by `finish`."""

    step: Step
    heads: Sequence[HeadPass]
    fence: Fence  # after all that was launched
    finish: Callable[[PendingPass], RunResult]
    can_be_followed: bool  # before it is collected, by passes that can have no drafts
    spec_decoder: SpecDecoder | None = None
    is_followed: bool = False
    began_s: float | None = None  # when its drafts were begun; None: another pass was running
    encode_s: Mapping[RequestId, float] = field(default_factory=dict)  # before it was launched
    result: RunResult | None = None
    draft_pass: DraftPass | None = None

    @property
    def sampled(self) -> SampledTokens | None:
        """Return the tokens that the next pass takes on the device; None if there are none."""
        return next((head.sampled for head in self.heads), None)

    def allows(self, plan: Plan) -> bool:
        is_pass = bool(plan.num_scheduled_tokens) and not plan.is_retry
        can_draft = self.spec_decoder is not None and self.spec_decoder.can_draft(plan)
        return self.can_be_followed and is_pass and not can_draft

    def collect(self) -> RunResult:
        if self.result is None:
            self.result = self.finish(self)
            self.heads = ()
            if self.step.unknown is not None:  # which refers to the pass before
                self.step = replace(self.step, unknown=None)
        return self.result

    def read(self) -> RunResult:
        """Wait for the results, without those of rows that got no token from the pass before."""
        result, unknown = RunResult(encode_s=dict(self.encode_s)), self.step.unknown
        for head in self.heads:
            head.collect(result)
        failed = () if unknown is None else unknown.failed_rows()
        return result.without(failed) if failed else result


@dataclass(frozen=True, slots=True)
class DrainedPass:
    """Implements `Pending`: nothing was launched."""

    device: Device

    def allows(self, plan: Plan) -> bool:
        return False

    def collect(self) -> RunResult:
        self.device.drain()
        return RunResult()
