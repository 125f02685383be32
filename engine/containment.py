"""Containment of failed passes: find the requests whose rows fail, and run the pass without them.

A pass can be repeated: it writes the same keys and values into the same slots, and a sampled token
counts only once the scheduler has applied it. After an exception, the runner removes its rows and
receives them again from the scheduler, whose state is still that before the pass. It then runs
them in halves until the failing rows are isolated. Their requests end with an error; the others
keep their tokens.

Recurrent states are an exception. Once the next pass is launched, the state that a failed pass read
is overwritten. Requests of both passes are then computed again, from the last cached state on.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields

from baton.core.ids import RequestId
from baton.core.output import Failure, FailureCause
from baton.engine.errors import FollowedPassFailed, PassHookFailed, PassSkipped, RunnerLost
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.scheduler import Scheduler

# If this many rows fail one after the other, with no success in between, the rows are not at
# fault: the engine ends, and its node is restarted.
MAX_CRASHES_IN_A_ROW = 4

log = logging.getLogger(__name__)


class Containment:
    """Runs plans. Raises the exception of a failed pass if no request is found to be at fault."""

    def __init__(self, run_pass: Callable[[Plan], RunResult], scheduler: Scheduler) -> None:
        self._run_pass = run_pass
        self._scheduler = scheduler
        self._num_crashes_in_a_row = 0
        self._has_failed = False  # the last pass
        # Requests whose states were overwritten, until they get a token again or end.
        self._recomputed: set[RequestId] = set()

    def must_end_first(self, plan: Plan) -> bool:
        """Return whether the pass of this plan must end before the next one is planned.

        After a failed pass, this one is skipped, and so would be the next one. If this one fails
        with a request whose state was overwritten before, the failing rows must be found. That
        needs the states that it read.
        """
        if self._has_failed:
            return True
        return bool(self._recomputed) and not self._recomputed.isdisjoint(plan.num_scheduled_tokens)

    def run(self, plan: Plan, collect: Callable[[], RunResult] | None = None) -> RunResult:
        """Return the result of a plan. `collect` returns that of its pass, if it is launched."""
        result = self._run(plan, collect)
        if self._recomputed:
            self._recomputed.difference_update(result.token_ids, result.vectors, result.failures)
            self._recomputed.intersection_update(self._scheduler.request_ids())
        return result

    def _run(self, plan: Plan, collect: Callable[[], RunResult] | None) -> RunResult:
        self._has_failed = False
        try:
            result = self._run_pass(plan) if collect is None else collect()
        except PassHookFailed as failure:
            raise failure.root from None
        except RunnerLost:
            raise
        except PassSkipped as skipped:
            request_ids = tuple(self._scheduler.running_rows())
            return self._run_in_parts(plan, [request_ids] if request_ids else [], skipped)
        except FollowedPassFailed as followed:
            return self._contain(plan, followed.root, overwritten=self._scheduler.overwritten())
        except Exception as failure:  # noqa: BLE001 - it is logged, or raised
            return self._contain(plan, failure)
        if plan.num_scheduled_tokens:
            self._num_crashes_in_a_row = 0
        return result

    def _contain(
        self, plan: Plan, failure: Exception, overwritten: Sequence[RequestId] = ()
    ) -> RunResult:
        """Run a failed pass again in parts, without rows whose states are overwritten."""
        # No row may be left if the plan was made before the result of the one before it.
        if not self._scheduler.running_rows() and not plan.num_scheduled_tokens:
            raise failure
        log.error(
            "a pass over %d requests failed; running it again in parts",
            len(plan.num_scheduled_tokens),
            exc_info=failure,
        )
        self._has_failed = True
        # The parts need the memory that the pass had when it failed, such as for lack of it.
        traceback.clear_frames(failure.__traceback__)
        if overwritten:
            log.error("the next pass was launched: computing %d states again", len(overwritten))
            self._remove_rows(overwritten, failure)  # also waits for the device
            self._scheduler.recompute(overwritten)
            self._recomputed.update(overwritten)
        return self._run_in_parts(plan, _halves(tuple(self._scheduler.running_rows())), failure)

    def _run_in_parts(
        self, plan: Plan, parts: list[Sequence[RequestId]], failure: Exception
    ) -> RunResult:
        """Run the rows of a plan again, the last part first. Splits those that fail."""
        rows, result = self._scheduler.running_rows(), RunResult()
        started = [row.request_id for row in plan.started]  # some may have ended since
        self._remove_rows((*plan.dropped, *started, *rows), failure)
        while parts:
            part = parts.pop()
            try:
                retry = plan.retry([rows[request_id] for request_id in part])
                _merge(self._run_pass(retry), into=result)
                self._num_crashes_in_a_row = 0
            except PassHookFailed as hook_failure:
                raise hook_failure.root from None
            except RunnerLost:
                raise
            except Exception as error:  # noqa: BLE001 - it goes to the request or the log
                self._remove_rows(part, failure)
                if len(part) > 1:
                    parts += _halves(part)
                else:
                    self._record_crash(part[0], error, result, failure)
        return result

    def _remove_rows(self, request_ids: Sequence[RequestId], failure: Exception) -> None:
        """Remove rows from the runner. Raises `failure` if even that fails."""
        try:
            self._run_pass(Plan(dropped=tuple(request_ids), is_retry=True))
        except Exception:
            log.exception("the runner cannot remove the rows of a failed pass")
            raise failure from None

    def _record_crash(
        self, request_id: RequestId, error: Exception, result: RunResult, failure: Exception
    ) -> None:
        self._num_crashes_in_a_row += 1
        if self._num_crashes_in_a_row >= MAX_CRASHES_IN_A_ROW:
            raise failure
        log.error("request %s ends: a pass of it alone fails", request_id, exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        result.failures[request_id] = Failure(reason, FailureCause.PASS)


def _halves(request_ids: Sequence[RequestId]) -> list[Sequence[RequestId]]:
    """Split into non-empty halves, in reverse order for use as a stack."""
    middle = len(request_ids) // 2
    parts = request_ids[middle:], request_ids[:middle]
    return [part for part in parts if part]


def _merge(part: RunResult, *, into: RunResult) -> None:
    for field in fields(RunResult):
        getattr(into, field.name).update(getattr(part, field.name))
