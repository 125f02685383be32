"""A thread for passes, so that the engine plans the next step while one is computed."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from baton.engine.errors import FollowedPassFailed, PassSkipped
from baton.engine.plan import Pending, Plan, Runner, RunResult

Call = Callable[[], None]
Calls = queue.SimpleQueue[Call | None]  # of a pass, which ends them with None
SKIPPED = "the pass before it failed"


class PassThread:
    """Runs passes of a runner, one after the other. Only one thread may use it.

    A pass is collected when its result is wanted, or before that if the next one needs its tokens
    on the host. The runner is free whenever all passes that were launched have been collected.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="passes")
        self._calls = Calls()  # of the pass that was launched last
        self._open: deque[_OpenPass] = deque()  # launched, but not collected: at most two

    def launch(self, plan: Plan, after: LaunchedPass | None = None) -> LaunchedPass:
        """Launch the pass of a plan after those launched before it.

        If the pass `after` fails, this one is skipped: `collect` raises PassSkipped.
        """
        launched = LaunchedPass(self)
        self._executor.submit(self._launch, plan, launched, after)
        return launched

    def want(self, launched: LaunchedPass) -> None:
        """Collect a pass as soon as the passes are launched that may be launched before."""
        self._executor.submit(self._collect_up_to, launched)

    def post(self, call: Call) -> None:
        """Let the thread that waits for the pass call this. Must be used by the pass itself."""
        self._calls.put(call)

    def call_after(self, call: Call) -> None:
        """Make a call when all passes that are launched have ended, before those launched later."""
        self._executor.submit(self._call_after_all, call)

    def close(self) -> None:
        """Wait for the passes that are launched, and end the thread."""
        self._executor.submit(self._collect_all)
        self._executor.shutdown()

    # --- on the thread of passes ------------------------------------------------------------------

    def _launch(self, plan: Plan, launched: LaunchedPass, after: LaunchedPass | None) -> None:
        try:
            if self._open and not self._open[-1].pending.allows(plan):
                self._collect_all()
            if after is not None and after.has_failed:
                raise PassSkipped(SKIPPED)
            self._calls = launched.calls
            pending = self._runner.launch(plan)
        except BaseException as error:  # noqa: BLE001 - `collect` raises it
            pending = _FailedLaunch(error)
        self._open.append(_OpenPass(launched, pending))

    def _call_after_all(self, call: Call) -> None:
        self._collect_all()
        call()

    def _collect_all(self) -> None:
        while self._open:
            self._collect_first()

    def _collect_up_to(self, launched: LaunchedPass) -> None:
        while any(each.launched is launched for each in self._open):
            self._collect_first()

    def _collect_first(self) -> None:
        """Collect the first of the passes that are not. If it fails, those after it are skipped."""
        launched, pending = self._open.popleft()
        try:
            result = pending.collect()
        except BaseException as error:  # noqa: BLE001 - `collect` raises it
            if self._open and isinstance(error, Exception):
                error = FollowedPassFailed(error)
            while self._open:
                self._open.popleft().launched.skip()
            launched.fail(error)
        else:
            launched.end(result)


class LaunchedPass:
    """A pass on another thread."""

    def __init__(self, passes: PassThread) -> None:
        self.calls = Calls()
        self._passes = passes
        self._result: Future[RunResult] = Future()
        self._is_wanted = False

    def wait(self, seconds: float) -> bool:
        """Wait for a call of the pass, and make it. Returns True once, when the pass has ended."""
        self._want()
        try:
            call = self.calls.get(timeout=seconds)
        except queue.Empty:
            return False
        if call is not None:
            call()
        return call is None

    def collect(self) -> RunResult:
        """Wait for the result. Raises the exception of a pass that failed.

        It is FollowedPassFailed if the next pass was launched before.
        """
        self._want()
        return self._result.result()

    def _want(self) -> None:
        if not self._is_wanted:
            self._is_wanted = True
            self._passes.want(self)

    # --- on the thread of passes ------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Return whether the pass is known to have failed."""
        return self._result.done() and self._result.exception() is not None

    def end(self, result: RunResult) -> None:
        self._result.set_result(result)
        self.calls.put(None)

    def fail(self, error: BaseException) -> None:
        self._result.set_exception(error)
        self.calls.put(None)

    def skip(self) -> None:
        """End the pass, whose results are not used, and drop the calls that it has posted."""
        while not self.calls.empty():
            self.calls.get()
        self.fail(PassSkipped(SKIPPED))


class _OpenPass(NamedTuple):
    launched: LaunchedPass
    pending: Pending


@dataclass(frozen=True, slots=True)
class _FailedLaunch:
    """Implements `Pending`."""

    error: BaseException

    def allows(self, plan: Plan) -> bool:
        return False

    def collect(self) -> RunResult:
        raise self.error
