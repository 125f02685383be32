"""A thread for passes, so that the engine plans the next step while one is computed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from baton.engine.errors import PassSkipped
from baton.engine.plan import Plan, Runner, RunResult


class PassThread:
    """Runs passes of a runner, one after the other. Only one thread may use it.

    The runner is free whenever all passes that were launched have been collected.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="passes")

    def launch(self, plan: Plan, after: LaunchedPass | None = None) -> LaunchedPass:
        """Run the pass of a plan after those launched before it.

        If the pass `after` fails, this one is skipped: `collect` raises PassSkipped.
        """
        plan = replace(plan, is_detached=True)
        return LaunchedPass(self._executor.submit(self._run, plan, after))

    def close(self) -> None:
        """Wait for the passes that are launched, and end the thread."""
        self._executor.shutdown()

    def _run(self, plan: Plan, after: LaunchedPass | None) -> RunResult:
        if after is not None and after.has_failed:
            raise PassSkipped("the pass before it failed")
        return self._runner.launch(plan).collect()


class LaunchedPass:
    """A pass on another thread. Implements `Pending`."""

    def __init__(self, future: Future[RunResult]) -> None:
        self._future = future

    @property
    def has_failed(self) -> bool:
        """Return whether a pass that has ended failed."""
        return self._future.exception() is not None

    def wait(self, seconds: float) -> bool:
        """Wait until the pass has ended, but not longer than this. Returns whether it has."""
        try:
            self._future.exception(seconds)
        except TimeoutError:
            return False
        return True

    def collect(self) -> RunResult:
        """Wait for the result. Raises the exception of a pass that failed."""
        return self._future.result()
