"""Engine thread: requests, outputs and the handling of a crash."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.core.errors import InvalidRequest
from baton.core.ids import RequestId
from baton.core.output import Failure, FailureCause, FinishReason, Output
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.core import EngineCore
from baton.engine.engine_thread import Compiler, EngineThread
from baton.engine.errors import EngineStopped, ProcessLost, RunnerLost
from baton.engine.plan import Plan, RunResult
from baton.engine.structured_output.compiler import GrammarCompiler
from tests.support.engines import VOCAB_SIZE, an_engine, an_engine_request
from tests.support.fake_runner import SynchronousRunner, tokens_alone
from tests.support.grammars import BAD, GOOD, SLOW, HeldLibrary
from tests.support.scheduler_state import is_idle

LONG = 10_000  # more tokens than a test waits for, fewer than the model may write
PATIENCE_S = 30.0  # only a hanging test ever waits so long


class BrokenRunner(SynchronousRunner):
    def run(self, plan: Plan) -> RunResult:
        raise ZeroDivisionError("a bug")


class Client:
    """Client that reads outputs on the test's thread."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def next_output(self) -> Output:
        return self.outputs.get(timeout=PATIENCE_S)

    def last_output(self) -> Output:
        while (output := self.next_output()).finish_reason is None:
            pass
        return output


@contextmanager
def a_loop(
    engine: EngineCore | None = None, compiler: Compiler | None = None
) -> Iterator[tuple[EngineThread, Client]]:
    client = Client()
    with EngineThread(engine or an_engine(), compiler=compiler) as loop:
        loop.attach(client.deliver)
        yield loop, client


@contextmanager
def a_loop_with(library: HeldLibrary) -> Iterator[tuple[EngineThread, Client]]:
    compiler: Compiler = GrammarCompiler(library.compile)
    with compiler, a_loop(an_engine(num_blocks=4096), compiler) as (loop, client):
        yield loop, client


def test_outputs_reach_the_client_in_order() -> None:
    with a_loop() as (loop, client):
        loop.submit(an_engine_request(prompt=(4, 5), max_tokens=3))

        outputs = [client.next_output() for _ in range(3)]

    assert [output.first_index for output in outputs] == [0, 1, 2]
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == tokens_alone((4, 5), 0, 3, VOCAB_SIZE)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_unservable_requests_are_refused_on_the_thread_of_the_caller() -> None:
    with a_loop() as (loop, client), pytest.raises(InvalidRequest):
        loop.submit(an_engine_request(prompt=()))

    assert client.outputs.empty()


def test_an_id_in_use_is_refused_through_the_outputs() -> None:
    with a_loop(an_engine(num_blocks=4096)) as (loop, client):
        loop.submit(an_engine_request("a", max_tokens=LONG // 2))
        client.next_output()
        loop.submit(an_engine_request("a"))

        refusal = client.last_output()

    assert refusal.finish_reason is FinishReason.ERROR
    assert refusal.failure is not None
    assert refusal.failure.cause is FailureCause.REQUEST
    assert "a" in refusal.failure.reason


def test_an_aborted_request_ends_and_releases_its_blocks() -> None:
    engine = an_engine(num_blocks=4096)
    with a_loop(engine) as (loop, client):
        loop.submit(an_engine_request("a", max_tokens=LONG // 2))
        client.next_output()
        loop.abort(RequestId("a"))

        ended = client.last_output()

    assert ended.finish_reason is FinishReason.ABORT
    engine.scheduler.check()


def test_detaching_aborts_all_requests() -> None:
    engine = an_engine(num_blocks=4096)
    with a_loop(engine) as (loop, client):
        loop.submit(an_engine_request("a", max_tokens=LONG // 2))
        client.next_output()
        loop.detach()

    assert engine.scheduler.request_ids() == ()
    engine.scheduler.check()


def test_an_engine_exception_fails_all_requests_and_refuses_new_ones() -> None:
    with a_loop(an_engine(runner=BrokenRunner())) as (loop, client):
        loop.submit(an_engine_request("a"))

        reported = client.last_output()
        loop.join(PATIENCE_S)

        assert reported.finish_reason is FinishReason.ERROR
        assert reported.failure is not None
        assert reported.failure.cause is FailureCause.ENGINE_STOPPED
        assert isinstance(loop.failure, ZeroDivisionError)
        with pytest.raises(EngineStopped):
            loop.submit(an_engine_request("b"))


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (RunnerLost, FailureCause.ENGINE_STOPPED),
        (ProcessLost, FailureCause.ENGINE_KILLED),  # its requests are not suspects at once
    ],
)
def test_a_named_end_of_the_engine_is_logged_in_a_line(
    kind: type[RunnerLost], cause: FailureCause, caplog: pytest.LogCaptureFixture
) -> None:
    class LostRunner(SynchronousRunner):
        def run(self, plan: Plan) -> RunResult:
            raise kind("rank 1 is gone")

    with a_loop(an_engine(runner=LostRunner())) as (loop, client):
        loop.submit(an_engine_request("a"))
        reported = client.last_output()
        loop.join(PATIENCE_S)

    reason = "the engine stopped: rank 1 is gone"
    assert reported.failure == Failure(reason, cause)
    [record] = [each for each in caplog.records if each.name == "baton.engine.engine_thread"]
    assert (record.getMessage(), record.exc_info) == (reason, None)


def test_a_request_submitted_in_the_failing_step_gets_an_error() -> None:
    client = Client()

    class BreaksOnceAnotherCame(SynchronousRunner):
        def run(self, plan: Plan) -> RunResult:
            loop.submit(an_engine_request("late"))
            raise ZeroDivisionError("a bug")

    with EngineThread(an_engine(runner=BreaksOnceAnotherCame())) as loop:
        loop.attach(client.deliver)
        loop.submit(an_engine_request("early"))

        ends = [client.last_output(), client.last_output()]

    assert [end.request_id for end in ends] == ["early", "late"]
    assert all(end.finish_reason is FinishReason.ERROR for end in ends)
    assert [end.failure.cause for end in ends if end.failure] == [FailureCause.ENGINE_STOPPED] * 2


def test_every_iteration_updates_the_heartbeat() -> None:
    now_s = 100.0
    with EngineThread(an_engine(), clock=lambda: now_s) as loop:
        turned = queue.SimpleQueue[None]()
        loop.post(lambda: turned.put(None))
        turned.get(timeout=PATIENCE_S)

        assert loop.seconds_since_heartbeat() == 0.0


def test_other_requests_are_answered_while_one_waits_for_its_grammar() -> None:
    library = HeldLibrary()
    with a_loop_with(library) as (loop, client):
        loop.submit(an_engine_request("slow", form=SLOW, max_tokens=1))
        loop.submit(an_engine_request("good", form=GOOD, max_tokens=1))
        loop.submit(an_engine_request("plain", max_tokens=40))
        # All their steps end while the grammar is being compiled.
        before = {client.last_output().request_id for _ in range(2)}
        library.may_end.set()
        after = client.last_output()

    assert before == {"good", "plain"}
    assert after.request_id == "slow"
    assert after.finish_reason is FinishReason.LENGTH


def test_a_grammar_that_does_not_compile_is_an_error_of_the_request() -> None:
    with a_loop_with(HeldLibrary()) as (loop, client):
        loop.submit(an_engine_request("bad", form=BAD))

        refusal = client.last_output()

    assert refusal.failure == Failure("it is bad", FailureCause.REQUEST)


def test_a_request_that_waits_for_its_grammar_can_be_aborted() -> None:
    held = [StructuredOutputs(regex=text) for text in ("one", "two")]
    library = HeldLibrary(frozenset(held))
    with a_loop_with(library) as (loop, client):
        for number, form in enumerate([*held, GOOD]):  # there are two threads
            loop.submit(an_engine_request(f"aborted{number}", form=form))
        library.has_begun.wait(PATIENCE_S)
        for number in range(3):
            loop.abort(RequestId(f"aborted{number}"))
        ended = [client.last_output().finish_reason for _ in range(3)]
        library.may_end.set()
        # Late results are ignored, and what no request waits for is not compiled.
        loop.submit(an_engine_request("later", form=SLOW, max_tokens=1))
        later = client.last_output()
        is_freed = queue.SimpleQueue[bool]()
        loop.post(lambda: is_freed.put(is_idle(loop._core.scheduler)))

        assert is_freed.get(timeout=PATIENCE_S)

    assert ended == [FinishReason.ABORT] * 3
    assert later.request_id == "later"
    assert GOOD not in library.compiled


def test_constraints_are_refused_on_the_thread_of_the_caller_without_a_compiler() -> None:
    with a_loop() as (loop, _), pytest.raises(InvalidRequest, match="not supported by this"):
        loop.submit(an_engine_request(form=GOOD))


def test_a_wait_for_a_state_ends_with_the_step_that_reaches_it() -> None:
    core = an_engine()
    with a_loop(core) as (loop, client):
        loop.submit(an_engine_request("a", max_tokens=3))

        loop.when(lambda: not core.scheduler.request_ids()).result(PATIENCE_S)

        assert client.last_output().finish_reason is FinishReason.LENGTH


def test_a_wait_for_a_state_fails_if_the_engine_ends_before() -> None:
    with a_loop(an_engine(runner=BrokenRunner())) as (loop, _):
        reached = loop.when(lambda: False)
        loop.submit(an_engine_request("a"))

        with pytest.raises(EngineStopped):
            reached.result(PATIENCE_S)
