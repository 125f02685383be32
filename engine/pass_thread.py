"""A thread for passes, so that the engine plans the next step while one is computed."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from baton.engine.errors import PassSkipped
from baton.engine.plan import Plan, Runner, RunResult

Call = Callable[[], None]
Calls = queue.SimpleQueue[Call | None]  # of a pass, which ends them with None


class PassThread:
    """Runs passes of a runner, one after the other. Only one thread may use it.

    The runner is free whenever all passes that were launched have been collected.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="passes")
        self._calls = Calls()  # of the pass that runs

    def launch(self, plan: Plan, after: LaunchedPass | None = None) -> LaunchedPass:
        """Run the pass of a plan after those launched before it.

        If the pass `after` fails, this one is skipped: `collect` raises PassSkipped.
        """
        calls = Calls()
        return LaunchedPass(self._executor.submit(self._run, plan, after, calls), calls)

    def post(self, call: Call) -> None:
        """Let the thread that waits for the pass call this. Must be used by the pass itself."""
        self._calls.put(call)

    def call_after(self, call: Call) -> None:
        """Make a call after the passes that are launched, and before those launched later."""
        self._executor.submit(call)

    def close(self) -> None:
        """Wait for the passes that are launched, and end the thread."""
        self._executor.shutdown()

    def _run(self, plan: Plan, after: LaunchedPass | None, calls: Calls) -> RunResult:
        self._calls = calls
        try:
            if after is not None and after.has_failed:
                raise PassSkipped("the pass before it failed")
            return self._runner.launch(plan).collect()
        finally:
            calls.put(None)


class LaunchedPass:
    """A pass on another thread. Implements `Pending`."""

    def __init__(self, future: Future[RunResult], calls: Calls) -> None:
        self._future = future
        self._calls = calls

    @property
    def has_failed(self) -> bool:
        """Return whether a pass that has ended failed."""
        return self._future.exception() is not None

    def wait(self, seconds: float) -> bool:
        """Wait for a call of the pass, and make it. Returns True once, when the pass has ended."""
        try:
            call = self._calls.get(timeout=seconds)
        except queue.Empty:
            return False
        if call is not None:
            call()
        return call is None

    def collect(self) -> RunResult:
        """Wait for the result. Raises the exception of a pass that failed."""
        return self._future.result()
