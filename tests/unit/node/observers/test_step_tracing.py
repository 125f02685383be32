"""Traces of engine steps: sampled, linked to requests and bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from baton.core.errors import InvalidConfig
from baton.core.ids import RequestId
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Plan, RunResult, StepObserver
from baton.engine.runner.config import RunnerConfig
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.node.observers.tracing import MAX_LINKS, NodeTracing, StepTracing
from baton.node.options import NodeOptions
from baton.telemetry import names
from baton.telemetry.tracing.node_timeline import NodeFacts, StepTimeline
from baton.telemetry.tracing.outlet import Timeline
from baton.telemetry.tracing.spans import Span, TraceContext
from baton.telemetry.tracing.tracer import NO_TRACER, Tracer
from tests.support.engines import VOCAB_SIZE, an_engine_request
from tests.support.fake_runner import FakeRunner, KvTensor, SynchronousRunner
from tests.support.traces import to_unix_ns

FACTS = NodeFacts("decode", "d0", "i1")
NUM_BLOCKS, BLOCK_SIZE = 1024, 4


class Taking(Tracer):
    """Enabled tracer that keeps all timelines."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Timeline] = []

    @property
    def is_on(self) -> bool:
        return True

    def take(self, timeline: Timeline) -> None:
        self.taken.append(timeline)

    @property
    def spans(self) -> list[Span]:
        return [span for one in self.taken for span in one.spans(to_unix_ns)]


@dataclass
class SlowRunner(SynchronousRunner):
    """Runner whose passes take a fixed time."""

    inner: FakeRunner
    took_s: float = 0.002

    def run(self, plan: Plan) -> RunResult:
        until_s = time.monotonic() + self.took_s
        while time.monotonic() < until_s:
            pass
        return self.inner.run(plan)


@dataclass
class World:
    tracer: Taking
    core: EngineCore
    runner: SlowRunner


def a_world(
    *,
    ratio: float = 1.0,
    traced: tuple[str, ...] = (),
    most_tokens: int = 64,
    collectives_s: Callable[[], float] = lambda: 0.0,
) -> World:
    tracer = Taking()
    contexts = {RequestId(name): TraceContext(place, 7) for place, name in enumerate(traced, 1)}
    steps = StepTracing(tracer, FACTS, ratio, contexts.get, collectives_s)
    config = SchedulerConfig(
        max_num_seqs=min(300, most_tokens),
        max_num_batched_tokens=most_tokens,
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(config, CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
    runner = SlowRunner(FakeRunner(KvTensor(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE))
    return World(tracer, EngineCore(scheduler, runner, observers=[steps]), runner)


def test_a_step_span_has_its_requests_and_computed_tokens() -> None:
    world = a_world(traced=("a",))
    world.core.scheduler.add(an_engine_request("a", prompt=(1, 2, 3, 4, 5)))
    world.core.step()
    world.core.scheduler.add(an_engine_request("b", prompt=(1, 2, 3)))

    world.core.step()

    first, second = world.tracer.spans
    assert tokens_of(first) == (1, 5, 0)
    assert tokens_of(second) == (2, 3, 1)
    assert second.name == names.ENGINE_STEP
    assert second.parent_id is None
    assert [(link.trace_id, link.span_id) for link in second.links] == [(1, 7)]
    assert second.attributes[names.STEP_NUMBER] == 2
    assert second.attributes[names.NODE] == "d0"


def test_a_step_of_several_processes_has_the_time_that_they_exchanged_numbers() -> None:
    spent_s = iter([1.0, 1.5, 9.0, 9.25])  # before and after each step
    world = a_world(collectives_s=lambda: next(spent_s))
    world.core.scheduler.add(an_engine_request("a", max_tokens=2))
    for _ in range(2):
        world.core.step()

    assert [span.attributes[names.COLLECTIVES_S] for span in world.tracer.spans] == [0.5, 0.25]
    alone = a_world()
    alone.core.scheduler.add(an_engine_request("a"))
    alone.core.step()
    assert names.COLLECTIVES_S not in alone.tracer.spans[0].attributes


def test_the_last_chunk_of_a_prompt_is_not_counted_as_an_output_token() -> None:
    world = a_world(most_tokens=4)
    world.core.scheduler.add(an_engine_request("a", prompt=(1, 2, 3, 4, 5), max_tokens=2))

    for _ in range(3):
        world.core.step()

    assert [tokens_of(span) for span in world.tracer.spans] == [(1, 4, 0), (1, 1, 0), (1, 0, 1)]


def test_the_parts_of_a_step_add_up_to_the_step() -> None:
    world = a_world()
    world.core.scheduler.add(an_engine_request("a"))

    world.core.step()

    [timeline] = world.tracer.taken
    [span] = world.tracer.spans
    assert isinstance(timeline, StepTimeline)
    parts_s = [span.attributes[part] for part in names.STEP_PARTS]
    assert all(isinstance(part_s, float) and part_s >= 0 for part_s in parts_s)
    took_s = timeline.times_s[-1] - timeline.times_s[0]
    assert sum(map(float, map(str, parts_s))) == pytest.approx(took_s)
    assert float(str(span.attributes[names.STEP_RUN])) >= world.runner.took_s


def test_steps_that_run_nothing_are_not_traced() -> None:
    world = a_world()

    for _ in range(5):
        world.core.step()

    assert world.tracer.taken == []


def test_only_the_configured_share_of_steps_is_traced() -> None:
    world = a_world(ratio=0.2)
    world.runner.took_s = 0.0
    world.core.scheduler.add(an_engine_request("a", max_tokens=300))

    for _ in range(300):
        world.core.step()

    assert 20 <= len(world.tracer.taken) <= 120  # 60 on average
    numbers = [int(str(span.attributes[names.STEP_NUMBER])) for span in world.tracer.spans]
    assert max(numbers) > 100  # those between are counted all the same


def test_links_to_requests_are_limited_by_the_link_limit_of_spans() -> None:
    everybody = tuple(f"r{number}" for number in range(MAX_LINKS + 20))
    world = a_world(traced=everybody, most_tokens=4096)
    for name in everybody:
        world.core.scheduler.add(an_engine_request(name))

    world.core.step()

    [span] = world.tracer.spans
    assert len(span.links) == MAX_LINKS
    assert span.attributes[names.STEP_ROWS] == MAX_LINKS + 20
    assert span.attributes[names.STEP_LINKS_LEFT_OUT] == 20


@pytest.mark.parametrize(
    ("tracer", "ratio", "observers"),
    [
        (Taking(), 0.5, [NodeTracing, StepTracing]),
        (Taking(), 0.0, [NodeTracing]),
        (NO_TRACER, 1.0, []),
    ],
    ids=["steps", "no steps", "no tracing"],
)
def test_with_step_tracing_off_there_is_no_step_observer(
    tracer: Tracer, ratio: float, observers: list[type[StepObserver]]
) -> None:
    tracing = NodeTracing(tracer, FACTS, step_ratio=ratio)

    assert [type(one) for one in tracing.step_observers()] == observers


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_the_share_of_traced_steps_is_between_zero_and_one(ratio: float) -> None:
    with pytest.raises(InvalidConfig, match="--trace-step-ratio"):
        NodeOptions(RunnerConfig("m"), trace_step_ratio=ratio)


def tokens_of(span: Span) -> tuple[object, ...]:
    reported = (names.STEP_ROWS, names.STEP_PREFILL_TOKENS, names.STEP_DECODE_TOKENS)
    return tuple(span.attributes[name] for name in reported)
