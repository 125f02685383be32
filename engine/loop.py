"""The engine's one thread. Everyone else leaves mail; only this thread touches the engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from engine.core import EngineCore
from engine.errors import EngineGone, InvalidRequest
from engine.grammar import Grammar
from engine.grammars.compiler import GrammarCompiler
from engine.request import ClientId, FinishReason, Output, RequestId, RequestSpec
from engine.structured_outputs import FIELD

Compiler = GrammarCompiler[Grammar]
# Called on the engine's thread with what one client got from one step; must not block.
Deliver = Callable[[list[Output]], None]

# An idle engine turns over this often, so that time-outs run and the heart is heard.
HEARTBEAT_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Arrival:
    """A letter that brings a request: should nobody read it any more, its sender can be told."""

    spec: RequestSpec
    add: Callable[[RequestSpec], None]

    def __call__(self) -> None:
        self.add(self.spec)


class EngineLoop:
    """Runs an EngineCore on a thread of its own, from `with` to the end of the block."""

    def __init__(
        self,
        core: EngineCore,
        *,
        name: str = "engine",
        clock: Callable[[], float] = time.monotonic,
        compiler: Compiler | None = None,  # None: no answer can be kept to a form
    ) -> None:
        self._core = core
        self._compiler = compiler
        self._clock = clock
        self._mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliver_by_client: dict[ClientId, Deliver] = {}
        self._thread = threading.Thread(target=self._run, name=name)
        self._is_stopping = False
        self._failure: BaseException | None = None
        # Held to post a request and to die: a request is either refused or in the mail.
        self._door = threading.Lock()
        self._last_beat_s = clock()

    def __enter__(self) -> EngineLoop:
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

    def attach(self, client_id: ClientId, deliver: Deliver) -> None:
        """From now on `deliver` gets the outputs of this client's requests."""
        self.post(lambda: self._deliver_by_client.__setitem__(client_id, deliver))

    def detach(self, client_id: ClientId) -> None:
        self.post(lambda: self._drop_client(client_id))

    def submit(self, spec: RequestSpec) -> None:
        """Raises InvalidRequest at once if it can never be served; else its outputs follow."""
        self._core.scheduler.validate(spec)
        form = spec.sampling.structured_outputs
        if form is not None and self._compiler is None:
            raise InvalidRequest(f"{FIELD} cannot be kept to here: nothing compiles them", FIELD)
        with self._door:
            self._raise_if_stopped()
            self.post(_Arrival(spec, self._add))
        if form is not None and self._compiler is not None:
            self._compiler.start(form, lambda outcome: self._compiled(spec, outcome))

    def abort(self, request_id: RequestId) -> None:
        """Ask for the end of a request; unknown and finished ones are left alone."""
        self.post(lambda: self._core.scheduler.abort(request_id))

    def post(self, action: Callable[[], None]) -> None:
        """Run something between two steps, on the engine's thread, and wake it for that."""
        self._mail.put(action)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the engine has ended: by a bug, or at the end of the `with` block."""
        self._thread.join(timeout_s)

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine, if something did."""
        return self._failure

    def beat(self) -> None:
        """A long step calls this when it moves on; on the engine's thread."""
        self._last_beat_s = self._clock()

    def since_last_beat_s(self) -> float:
        """How long ago the engine last moved on: what readiness is judged by."""
        return self._clock() - self._last_beat_s

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
        except BaseException as failure:
            log.exception("the engine stopped on a bug")
            with self._door:
                self._failure = failure
            self._fail_all(f"the engine stopped: {failure!r}")

    def _turn(self) -> None:
        self._read_mail()
        self.beat()
        outputs = self._core.step()
        for client_id, its_outputs in outputs.by_client.items():
            self._hand_out(client_id, its_outputs)

    def _read_mail(self) -> None:
        """Wait for the first letter as long as the engine may sleep, then take all there are."""
        may_sleep_s = self._core.may_sleep_s()
        wait_s = HEARTBEAT_S if may_sleep_s is None else min(may_sleep_s, HEARTBEAT_S)
        try:
            self._mail.get(timeout=wait_s)() if wait_s > 0 else self._mail.get_nowait()()
            while True:
                self._mail.get_nowait()()
        except queue.Empty:
            return

    def _hand_out(self, client_id: ClientId, outputs: list[Output]) -> None:
        deliver = self._deliver_by_client.get(client_id)
        if deliver is not None:
            deliver(outputs)

    def _add(self, spec: RequestSpec) -> None:
        try:
            self._core.scheduler.add(spec)
        except InvalidRequest as refusal:
            self._hand_out(spec.client_id, [_refused(spec.request_id, str(refusal))])

    def _compiled(self, spec: RequestSpec, outcome: Grammar | InvalidRequest) -> None:
        """Called on any thread. Its request has arrived before: mail keeps its order."""
        scheduler = self._core.scheduler
        if isinstance(outcome, InvalidRequest):
            reason = str(outcome)
            self.post(lambda: scheduler.grammar_refused(spec, reason))
        else:
            self.post(lambda: scheduler.grammar_came(spec, outcome))

    def _drop_client(self, client_id: ClientId) -> None:
        del self._deliver_by_client[client_id]
        self._core.scheduler.abort_client(client_id)

    def _stop(self) -> None:
        self._is_stopping = True

    def _fail_all(self, reason: str) -> None:
        for client_id, request_ids in self._core.scheduler.request_ids_by_client().items():
            self._hand_out(client_id, [_refused(request_id, reason) for request_id in request_ids])
        for spec in self._unread_requests():
            self._hand_out(spec.client_id, [_refused(spec.request_id, reason)])

    def _unread_requests(self) -> Iterator[RequestSpec]:
        while True:
            try:
                letter = self._mail.get_nowait()
            except queue.Empty:
                return
            if isinstance(letter, _Arrival):
                yield letter.spec

    def _raise_if_stopped(self) -> None:
        if self._failure is not None or self._is_stopping:
            why = "it was told to stop" if self._failure is None else repr(self._failure)
            raise EngineGone(f"the engine of this node has stopped: {why}")


def _refused(request_id: RequestId, reason: str) -> Output:
    return Output(request_id, 0, finish_reason=FinishReason.ERROR, error=reason)
