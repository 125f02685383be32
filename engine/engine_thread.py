"""The engine thread. Other threads post actions; only this thread touches the engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from baton.core.errors import InvalidRequest, NamedError
from baton.core.ids import RequestId
from baton.core.output import Failure, FailureCause, FinishReason, Output
from baton.core.request import EngineRequest
from baton.core.structured_outputs import FIELD, StructuredOutputs
from baton.engine.config import HEARTBEAT_S
from baton.engine.core import EngineCore
from baton.engine.errors import EngineGone, ProcessLost
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.grammar import Grammar

Compiler = GrammarCompiler[Grammar]
OnCompiled = Callable[[Grammar | InvalidRequest], None]
# Called on the engine thread with the outputs of one step; must not block.
Deliver = Callable[[list[Output]], None]

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class EngineInbox(queue.SimpleQueue[Callable[[], None]]):
    """Actions, which run between two steps."""

    def wake(self) -> None:
        """Let the engine run a step, which polls what moves KV."""
        self.put(_do_nothing)


def _do_nothing() -> None:
    """Wake the engine, as all actions do."""


@dataclass(frozen=True)
class _AddRequest:
    """Action that adds a request. If the engine ends before it runs, the client gets an error."""

    request: EngineRequest
    add: Callable[[EngineRequest], None]

    def __call__(self) -> None:
        self.add(self.request)


class _EngineCall(Generic[Result]):
    """Action whose caller waits for the result. If the engine ends before, it gets an error."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self.result: Future[Result] = Future()

    def __call__(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self._function())
        except BaseException as bug:  # which ends the engine
            self.result.set_exception(bug)
            raise


class EngineThread:
    """Runs an EngineCore on its own thread for the duration of a `with` block."""

    def __init__(
        self,
        core: EngineCore,
        *,
        name: str = "engine",
        clock: Callable[[], float] = time.monotonic,
        compiler: Compiler | None = None,  # None: structured outputs are rejected
        inbox: EngineInbox | None = None,  # for actions of what the engine is made from
    ) -> None:
        self._core = core
        self._compiler = compiler
        self._clock = clock
        self._inbox = EngineInbox() if inbox is None else inbox
        self._deliver: Deliver | None = None
        # Not yet compiled grammars, and their callbacks.
        self._compilations: dict[RequestId, tuple[StructuredOutputs, OnCompiled]] = {}
        self._thread = threading.Thread(target=self._run, name=name)
        self._awaited: list[tuple[Callable[[], bool], _EngineCall[None]]] = []
        self._is_stopping = False
        self._failure: BaseException | None = None
        # Guards submitting against the engine's end: a request is either rejected or in the inbox.
        self._submit_lock = threading.Lock()
        self._last_beat_s = clock()

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.post(self._stop)
        self._thread.join()

    def attach(self, deliver: Deliver) -> None:
        """Pass outputs to `deliver` from now on. Without it they are dropped."""
        self.post(lambda: self._set_deliver(deliver))

    def detach(self) -> None:
        """Abort all requests, and drop outputs from now on."""
        for request_id in list(self._compilations):
            self._cancel_compilation(request_id)
        self.post(self._abort_all)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest if it can never be served."""
        self._core.scheduler.validate(request)
        structured_outputs = request.sampling.structured_outputs
        if structured_outputs is not None and self._compiler is None:
            raise InvalidRequest(f"{FIELD} is not supported by this engine: leave it out", FIELD)
        with self._submit_lock:
            self._raise_if_stopped()
            self.post(_AddRequest(request, self._add_request))
        if structured_outputs is not None and self._compiler is not None:
            self._start_compilation(self._compiler, request, structured_outputs)

    def abort(self, request_id: RequestId) -> None:
        """Request the end of a request; unknown and finished ones are ignored."""
        self._cancel_compilation(request_id)
        self.post(lambda: self._core.scheduler.abort(request_id))

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the engine thread between two steps. Wakes the thread."""
        self._inbox.put(action)

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run `function` as `post` does, for its result. Raises EngineGone, as the result may."""
        call = _EngineCall(function)
        with self._submit_lock:
            self._raise_if_stopped()
            self.post(call)
        return call.result

    def when(self, is_reached: Callable[[], bool]) -> Future[None]:
        """Wait until a step has reached a state. Raises EngineGone, as the result may."""
        reached: _EngineCall[None] = _EngineCall(_do_nothing)
        with self._submit_lock:
            self._raise_if_stopped()
            self._awaited.append((is_reached, reached))
            self._inbox.wake()
        return reached.result

    def post_after_passes(self, action: Callable[[], None]) -> None:
        """Run `action` between two passes: after those that are launched by then."""
        self.post(lambda: self._core.call_after_passes(action))

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the engine has ended, by a failure or at the end of the `with` block."""
        self._thread.join(timeout_s)

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the engine, if any."""
        return self._failure

    def beat(self) -> None:
        """Record a heartbeat on the engine thread. Long steps call it whenever they progress."""
        self._last_beat_s = self._clock()

    def seconds_since_heartbeat(self) -> float:
        """Return the time since the engine last made progress. Readiness depends on it."""
        return self._clock() - self._last_beat_s

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._run_once()
        except BaseException as failure:
            if isinstance(failure, NamedError):
                reason = f"the engine stopped: {failure}"
                log.error(reason)
            else:
                reason = f"the engine stopped: {failure!r}"
                log.exception("the engine stopped on an unexpected exception")
            with self._submit_lock:
                self._failure = failure
            is_killed = isinstance(failure, ProcessLost)
            cause = FailureCause.ENGINE_KILLED if is_killed else FailureCause.ENGINE_STOPPED
            self._fail_all(Failure(reason, cause))
        finally:
            self._core.close()

    def _run_once(self) -> None:
        self._run_posted_actions()
        self.beat()
        self._pass_on(self._core.step())
        for waiting in self._awaited[:]:
            if waiting[0]():
                self._awaited.remove(waiting)
                waiting[1]()

    def _run_posted_actions(self) -> None:
        """Run all posted actions. Waits for the first one for as long as the engine may sleep."""
        max_idle_s = self._core.max_idle_s()
        wait_s = HEARTBEAT_S if max_idle_s is None else min(max_idle_s, HEARTBEAT_S)
        try:
            self._inbox.get(timeout=wait_s)() if wait_s > 0 else self._inbox.get_nowait()()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _pass_on(self, outputs: list[Output]) -> None:
        if outputs and self._deliver is not None:
            self._deliver(outputs)

    def _add_request(self, request: EngineRequest) -> None:
        try:
            self._core.scheduler.enqueue(request)
        except InvalidRequest as refusal:
            failure = Failure(str(refusal), FailureCause.REQUEST)
            self._pass_on([_failed_output(request, failure)])

    def _start_compilation(
        self, compiler: Compiler, request: EngineRequest, wanted: StructuredOutputs
    ) -> None:
        def on_compiled(outcome: Grammar | InvalidRequest) -> None:
            self._on_compiled(request, outcome)

        self._compilations[request.request_id] = (wanted, on_compiled)
        compiler.start(wanted, on_compiled)

    def _cancel_compilation(self, request_id: RequestId) -> None:
        compilation = self._compilations.pop(request_id, None)
        if compilation is not None and self._compiler is not None:
            self._compiler.cancel(*compilation)

    def _on_compiled(self, request: EngineRequest, outcome: Grammar | InvalidRequest) -> None:
        """Called on any thread. The inbox is first in, first out: the request was added before."""
        self._compilations.pop(request.request_id, None)
        scheduler = self._core.scheduler
        if isinstance(outcome, InvalidRequest):
            reason = str(outcome)
            self.post(lambda: scheduler.reject_grammar(request, reason))
        else:
            self.post(lambda: scheduler.add_grammar(request, outcome))

    def _set_deliver(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def _abort_all(self) -> None:
        self._deliver = None
        self._core.scheduler.abort_all()

    def _stop(self) -> None:
        self._is_stopping = True

    def _fail_all(self, failure: Failure) -> None:
        actions = list(self._pending_actions())
        pending = [action.request for action in actions if isinstance(action, _AddRequest)]
        failed = [*self._core.scheduler.requests(), *pending]
        self._pass_on([_failed_output(request, failure) for request in failed])
        for action in (*actions, *(call for _, call in self._awaited)):
            if isinstance(action, _EngineCall) and action.result.set_running_or_notify_cancel():
                action.result.set_exception(EngineGone(failure.reason))

    def _pending_actions(self) -> Iterator[Callable[[], None]]:
        while True:
            try:
                yield self._inbox.get_nowait()
            except queue.Empty:
                return

    def _raise_if_stopped(self) -> None:
        if self._failure is not None or self._is_stopping:
            reason = "the node shuts down" if self._failure is None else repr(self._failure)
            raise EngineGone(f"the engine of this node has stopped: {reason}")


def _failed_output(request: EngineRequest, failure: Failure) -> Output:
    return Output(
        request.request_id,
        0,
        registration=request.registration,
        finish_reason=FinishReason.ERROR,
        failure=failure,
    )
