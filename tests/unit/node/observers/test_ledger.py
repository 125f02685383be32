"""Accounting of requests on a node, from the steps of its engine."""

from __future__ import annotations

from baton.core.ids import BlockId, HandoffId, NodeId, Peer, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import Plan, PlanRow, StepRecord
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.kv_transfer.types import NO_REPORTS, KvOrders, KvReports, Receive
from baton.node.servicer import RequestLedger
from tests.support.engines import VOCAB_SIZE, an_engine, an_engine_request
from tests.support.fake_runner import CrashPlace, FakeRunner, KvTensor

BLOCK_SIZE = 4
HANDOFF = HandoffId("a", 1)
A = RequestId("a#1")


def a_row(num_prompt_tokens: int, num_computed_tokens: int) -> PlanRow:
    tokens = (1,) * num_prompt_tokens
    blocks = ((BlockId(0),),)
    sampling = SamplingParams()
    return PlanRow(A, tokens, num_prompt_tokens, num_computed_tokens, blocks, sampling, seed=0)


def an_end(
    reports: KvReports = NO_REPORTS, transfers: tuple[TransferRecord, ...] = ()
) -> StepRecord:
    return StepRecord(Plan(), (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), reports, transfers)


def test_received_kv_is_counted_when_its_record_is_read() -> None:
    ledger = RequestLedger(on_change=lambda: None)
    receive = Receive(
        HANDOFF,
        Peer(NodeId("p"), "h:1"),
        first_block=2,
        block_ids=(BlockId(5), BlockId(6)),
        num_tokens=16,
        num_cached_tokens=8,
    )
    record = TransferRecord(
        HANDOFF, TransferRole.RECEIVED, "x", 1.0, outcome="done", num_blocks=2, num_bytes=64
    )
    with ledger.open_entry(A) as entry:
        ledger.note_plan(Plan(kv_orders=KvOrders(receives=(receive,))), 1.2)
        ledger.note_end(an_end(transfers=(record,)))
        ledger.note_plan(Plan(started=(a_row(16, 16),)), 2.2)

    assert (entry.num_received_blocks, entry.num_received_bytes) == (2, 64)
    assert entry.num_cached_prompt_tokens == 8
    assert entry.num_computed_prompt_tokens == 0


def test_a_recomputed_prompt_counts_again_and_its_hits_do_not() -> None:
    ledger = RequestLedger(on_change=lambda: None)
    with ledger.open_entry(A) as entry:
        ledger.note_plan(Plan(started=(a_row(16, 4),)), 1.2)
        ledger.note_plan(Plan(started=(a_row(16, 8),)), 2.2)

    assert entry.num_cached_prompt_tokens == 4
    assert entry.num_computed_prompt_tokens == 12 + 8


def test_a_repeated_pass_counts_its_prompt_tokens_once() -> None:
    ledger = RequestLedger(on_change=lambda: None)
    runner = FakeRunner(KvTensor(64, BLOCK_SIZE), VOCAB_SIZE)
    runner.crashing = {RequestId("b"): CrashPlace.PASS}
    engine = an_engine(runner=runner, observers=[ledger])
    for name in "ab":
        engine.scheduler.add(an_engine_request(name, prompt=(1, 2, 3)))

    with ledger.open_entry(RequestId("a")) as entry:
        engine.step()

    assert entry.num_computed_prompt_tokens == 3


def test_changes_and_completed_sends_are_reported() -> None:
    sent: list[HandoffId] = []
    changes: list[int] = []
    ledger = RequestLedger(on_change=lambda: changes.append(1))
    ledger.on_sent = sent.append

    ledger.note_plan(Plan(num_scheduled_tokens={A: 1}), 1.2)
    ledger.note_end(an_end())
    assert (sent, changes) == ([], [])

    ledger.note_plan(Plan(dropped=(A,)), 2.2)
    ledger.note_end(an_end(KvReports(finished_sending=(HANDOFF,))))
    assert (sent, len(changes)) == ([HANDOFF], 2)
