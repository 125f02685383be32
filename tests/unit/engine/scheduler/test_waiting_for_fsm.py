"""Status WAITING_FOR_FSM: a request waits for its grammar without blocking others."""

from __future__ import annotations

from baton.core.ids import HandoffId, RequestId
from baton.core.output import Failure, FailureCause, FinishReason, Output
from baton.core.request import EngineRequest, ReceiveKv
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from tests.support.engine_world import SOURCE
from tests.support.grammars import GOOD, AnyAnswer
from tests.support.scheduler_state import is_idle

EOS, STOP, OTHER = 7, 8, 9
GRAMMAR = AnyAnswer()


def test_a_request_waits_for_its_grammar_while_later_ones_run() -> None:
    scheduler = _scheduler()
    scheduler.add(_engine_request("slow"))
    scheduler.add(_engine_request("plain", is_ruled=False))

    plan = scheduler.schedule(0.0)

    assert _started(plan) == ["plain"]
    assert scheduler.stats().num_waiting_for_fsm == 1
    assert not is_idle(scheduler)
    scheduler.check()


def test_a_scheduler_that_only_waits_for_a_grammar_has_no_work() -> None:
    scheduler = _scheduler()
    scheduler.add(_engine_request("slow"))

    assert not scheduler.has_work
    assert scheduler.schedule(0.0).is_empty


def test_a_request_runs_with_its_grammar_once_it_is_compiled() -> None:
    scheduler = _scheduler()
    request = _engine_request("slow")
    scheduler.add(request)
    scheduler.add_grammar(request, GRAMMAR)

    (row,) = scheduler.schedule(0.0).started

    assert row.grammar is GRAMMAR
    assert scheduler.stats().num_waiting_for_fsm == 0


def test_a_request_that_waits_for_its_grammar_keeps_its_queue_position() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    first = _engine_request("first")
    scheduler.add(first)
    scheduler.add(_engine_request("second", is_ruled=False))
    scheduler.add_grammar(first, GRAMMAR)

    assert _started(scheduler.schedule(0.0)) == ["first"]


def test_a_receiver_grants_no_blocks_before_its_grammar_is_compiled() -> None:
    scheduler = _scheduler()
    request = _engine_request("r", receives=True)
    scheduler.add(request)
    before = scheduler.schedule(0.0)
    scheduler.update(before, RunResult())
    scheduler.add_grammar(request, GRAMMAR)
    after = scheduler.schedule(1.0)

    assert before.kv_orders.receives == ()
    assert len(after.kv_orders.receives) == 1


def test_a_failed_grammar_ends_the_request_with_the_reason() -> None:
    scheduler = _scheduler()
    request = _engine_request("bad")
    scheduler.add(request)
    scheduler.reject_grammar(request, "it never ends")

    (output,) = _step(scheduler, {})

    assert output.finish_reason is FinishReason.ERROR
    assert output.failure == Failure("it never ends", FailureCause.REQUEST)
    assert is_idle(scheduler)
    scheduler.check()


def test_an_abort_ends_a_request_that_waits_for_its_grammar_and_late_ones_are_ignored() -> None:
    scheduler = _scheduler()
    old, new = _engine_request("a"), _engine_request("a")
    scheduler.add(old)
    scheduler.abort(RequestId("a"))
    scheduler.add_grammar(old, GRAMMAR)
    scheduler.add(new)
    scheduler.reject_grammar(old, "too late to matter")

    (output,) = _step(scheduler, {})

    assert output.finish_reason is FinishReason.ABORT
    assert scheduler.stats().num_waiting_for_fsm == 1
    scheduler.check()


def test_a_preempted_request_restarts_with_its_grammar() -> None:
    scheduler = _scheduler(num_blocks=4)
    request = _engine_request("a", prompt_len=7, max_tokens=8)
    scheduler.add(_engine_request("b", prompt_len=7, max_tokens=8, is_ruled=False))
    _step(scheduler, {"b": OTHER})
    scheduler.add(request)
    scheduler.add_grammar(request, GRAMMAR)
    rows = []
    for _ in range(40):
        plan = scheduler.schedule(0.0)
        rows += [row for row in plan.started if row.request_id == "a"]
        tokens = {str(name): OTHER for name in plan.num_scheduled_tokens}
        scheduler.update(plan, _run(tokens))
        if is_idle(scheduler):
            break

    assert len(rows) > 1  # it was put back
    assert all(row.grammar is GRAMMAR for row in rows)
    scheduler.check()


def test_an_end_token_ends_a_complete_answer_before_min_tokens() -> None:
    assert _reason_after(EOS, min_tokens=5, is_ruled=True) is FinishReason.STOP


def test_without_a_grammar_min_tokens_applies() -> None:
    assert _reason_after(EOS, min_tokens=5, is_ruled=False) is None


def test_other_stop_tokens_are_ignored_before_min_tokens() -> None:
    assert _reason_after(STOP, min_tokens=5, is_ruled=True) is None


def test_a_row_rejected_by_its_grammar_is_an_error_of_the_request() -> None:
    scheduler = _scheduler()
    request = _engine_request("a")
    scheduler.add(request)
    scheduler.add_grammar(request, GRAMMAR)
    plan = scheduler.schedule(0.0)

    refused = RunResult(
        failures={RequestId("a"): Failure("it grew too large", FailureCause.REQUEST)}
    )
    outputs = scheduler.update(plan, refused)

    (output,) = outputs
    assert output.failure == Failure("it grew too large", FailureCause.REQUEST)
    scheduler.check()


def _reason_after(token_id: int, *, min_tokens: int, is_ruled: bool) -> FinishReason | None:
    scheduler = _scheduler()
    request = _engine_request("a", min_tokens=min_tokens, is_ruled=is_ruled, max_tokens=9)
    scheduler.add(request)
    if is_ruled:
        scheduler.add_grammar(request, GRAMMAR)
    (output,) = _step(scheduler, {"a": token_id})
    return output.finish_reason


def _scheduler(*, max_num_seqs: int = 4, num_blocks: int = 32) -> Scheduler:
    config = SchedulerConfig(
        max_num_batched_tokens=64,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        eos_token_ids=frozenset({EOS}),
    )
    return Scheduler(config, CacheConfig(num_blocks=num_blocks, block_size=4))


def _engine_request(
    name: str,
    *,
    is_ruled: bool = True,
    receives: bool = False,
    prompt_len: int = 3,
    min_tokens: int = 0,
    max_tokens: int = 6,
) -> EngineRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=(STOP,),
        structured_outputs=GOOD if is_ruled else None,
    )
    prompt = tuple(range(100, 100 + prompt_len))
    receive = ReceiveKv(HandoffId(name, 1), SOURCE) if receives else None
    return EngineRequest(RequestId(name), prompt, sampling, seed=0, receive_from=receive)


def _step(scheduler: Scheduler, tokens: dict[str, int]) -> list[Output]:
    plan = scheduler.schedule(0.0)
    return scheduler.update(plan, _run(tokens))


def _run(tokens: dict[str, int]) -> RunResult:
    return RunResult(token_ids={RequestId(name): [token] for name, token in tokens.items()})


def _started(plan: Plan) -> list[str]:
    return [str(row.request_id) for row in plan.started]
