"""A prefill node and a decode node whose caches are full do not wait for each other."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import HandoffId, NodeId, Peer, RequestId
from baton.core.output import FirstToken
from baton.core.request import EngineRequest, ReceiveKv
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import SchedulerConfig, SchedulingPolicy
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.types import KvOrders, KvReports, Landed, Lost, Receive
from tests.support.hypothesis_profiles import num_examples
from tests.support.requests import make_engine_request

BLOCK_SIZE = 16
SOURCE = Peer(NodeId("prefill"), "x")
MAX_IDLE_STEPS = 16  # until the message that is the latest has come, and what follows from it


@dataclass(frozen=True)
class Load:
    """Requests that arrive all at once, in another order at each node."""

    sizes: Sequence[int]  # of prompts, in tokens
    max_tokens: int
    lateness: int  # steps, at most
    num_clients: int
    num_priorities: int


@dataclass
class Side:
    """A scheduler with the events that reach it in coming steps."""

    num_blocks: int
    scheduler: Scheduler = field(init=False)
    requests: defaultdict[int, list[EngineRequest]] = field(
        default_factory=lambda: defaultdict(list)
    )
    reports: KvReports = field(default_factory=KvReports)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=512,
            max_num_seqs=64,
            max_model_len=self.num_blocks * BLOCK_SIZE,
            policy=SchedulingPolicy.PRIORITY,
        )
        self.scheduler = Scheduler(config, CacheConfig(self.num_blocks, BLOCK_SIZE))

    def step(self, now: int) -> tuple[KvOrders, int]:
        """Return the orders of a step, and how many requests have ended in it."""
        for request in self.requests.pop(now, ()):
            self.scheduler.add(request)
        plan: Plan = self.scheduler.schedule(float(now))
        tokens = RunResult({request_id: [1] for request_id in plan.num_scheduled_tokens})
        reports, self.reports = self.reports, KvReports()
        outputs = self.scheduler.update(plan, tokens, reports)
        return plan.kv_orders, sum(output.finish_reason is not None for output in outputs)


class Pair:
    """Two nodes, of which one reads the other's hand-offs as soon as it has granted blocks."""

    def __init__(self, load: Load, num_blocks: int, draw: random.Random) -> None:
        self.prefill, self.decode = Side(num_blocks), Side(num_blocks)
        self._granted: dict[HandoffId, Receive] = {}
        self._complete: set[HandoffId] = set()
        self._withdrawn: set[HandoffId] = set()
        self.num_withdrawn = 0
        for number, size in enumerate(load.sizes):
            request_id = RequestId(str(number))
            handoff_id = HandoffId(f"handoff {number}", 1)
            request = replace(
                make_engine_request(
                    [number, *range(1, size)],  # shared with no other
                    request_id=request_id,
                    max_tokens=load.max_tokens,
                    client=str(number % load.num_clients),
                    priority=draw.randrange(load.num_priorities),
                ),
                arrival_s=float(number),
            )
            receiver = replace(request, receive_from=ReceiveKv(handoff_id, SOURCE))
            self.prefill.requests[draw.randint(0, load.lateness)].append(
                replace(request, send_to=handoff_id)
            )
            self.decode.requests[draw.randint(0, load.lateness)].append(receiver)

    def step(self, now: int) -> int:
        """Return the number of hand-offs and requests that have ended."""
        sent, _ = self.prefill.step(now)
        self._complete |= {order.handoff_id for order in sent.completes}
        gone = {order.handoff_id for order in sent.withdraws}
        self._complete -= gone
        self._withdrawn |= gone
        self.num_withdrawn += len(gone)
        wanted, num_ended = self.decode.step(now)
        self._granted |= {order.handoff_id: order for order in wanted.receives}
        lost = self._granted.keys() & self._withdrawn
        landed = self._granted.keys() & self._complete
        self.prefill.reports = KvReports(
            finished_sending=(*landed, *gone),
            granted=tuple(order.handoff_id for order in wanted.receives),
        )
        self.decode.reports = KvReports(
            finished_recving=tuple(
                Landed(each, self._granted[each].num_tokens, FirstToken(1)) for each in landed
            ),
            failed_recving=tuple(Lost(each, "withdrawn") for each in lost),
            released=tuple(lost),
        )
        for handoff_id in (*landed, *lost):
            del self._granted[handoff_id]
        self._complete -= landed
        return len(landed) + len(gone) + num_ended


loads = st.builds(
    Load,
    sizes=st.lists(st.integers(1, 12 * BLOCK_SIZE), min_size=1, max_size=40),
    max_tokens=st.integers(1, 24),
    lateness=st.integers(0, 8),
    num_clients=st.integers(1, 8),
    num_priorities=st.integers(1, 3),
)


@settings(max_examples=num_examples(60))
@given(load=loads, num_blocks=st.integers(14, 32), seed=st.integers(0, 2**16))
def test_all_requests_end_whatever_the_order_in_which_two_full_nodes_learn_of_them(
    load: Load, num_blocks: int, seed: int
) -> None:
    pair = Pair(load, num_blocks, random.Random(seed))
    now = num_idle = 0
    schedulers = pair.prefill.scheduler, pair.decode.scheduler
    while now <= load.lateness or any(each.request_ids() for each in schedulers):
        is_busy = pair.step(now) or any(each.stats().num_running for each in schedulers)
        num_idle = 0 if is_busy else num_idle + 1
        assert num_idle < MAX_IDLE_STEPS, "both nodes wait"
        now += 1
    for _ in range(3):
        pair.step(now)
    for each in schedulers:
        each.check()
        assert each.stats().num_free_blocks == num_blocks
