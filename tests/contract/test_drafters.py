"""Drafters that compute inside the passes of a runner, and proposers whose drafts are wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.engine.core import EngineCore
from baton.engine.events import SchedulerStats
from baton.engine.kv_cache.config import CacheConfig
from baton.engine.plan import RunResult
from baton.engine.runner.batch.input_batch import Step
from baton.engine.runner.batch.unknown_tokens import SampledTokens
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.drafters import DRAFTERS
from baton.engine.runner.drafting.drafter import Drafter
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.spec_decode.config import METHODS, Speculation
from baton.engine.spec_decode.proposer import DraftRow, Drafts
from tests.support.models import prompt_of
from tests.support.runner_drivers import GREEDY

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNK = 24
SPECULATION = Speculation(num_tokens=2, method="observed")


@dataclass
class Observer:
    """Drafts the newest token again, and keeps the positions whose hidden states it has seen."""

    seen: list[int] = field(default_factory=list)
    num_proposals: int = 0

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        drafts = {row.request_id: row.known_tokens[-1:].tolist() for row in rows}
        self.num_proposals += len(drafts)
        return drafts

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        """Do nothing: there is one request."""

    @property
    def needs_all_tokens(self) -> bool:
        return True

    def begin(self, step: Step, inputs: StepInputs) -> _Observed:
        return _Observed(self, step)


@dataclass
class _Observed:
    """Implements `DraftPass`."""

    observer: Observer
    step: Step
    num_states: int = 0

    def launch(self, hidden_states: HiddenStates, sampled: SampledTokens | None) -> None:
        assert hidden_states.by_token is not None
        self.num_states = len(hidden_states.by_token)

    def commit(self, result: RunResult) -> None:
        assert self.num_states == len(self.step.token_ids)
        self.observer.seen += self.step.layout.positions.tolist()


def token_ids(folder: Path, observer: Observer, speculation: Speculation | None) -> list[int]:
    config = RunnerConfig(
        str(folder),
        kv_cache_bytes=1 << 20,
        max_num_seqs=2,
        kernels="torch",
        speculation=speculation,
    )
    drafters = {"observed": lambda *_: Drafter(observer, observer)}
    limits = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=CHUNK, num_lookahead_tokens=2)
    sampling = replace(GREEDY, max_tokens=6, ignore_eos=True)
    found: list[int] = []
    with load_runner(config, drafters=drafters) as runner:
        engine = EngineCore(Scheduler(limits, CacheConfig(num_blocks=20)), runner)
        engine.scheduler.add(EngineRequest(RequestId("a"), prompt_of(60), sampling, seed=0))
        while engine.scheduler.has_work:
            found += [token for output in engine.step() for token in output.token_ids]
        engine.close()
    return found


def test_a_drafter_computes_in_each_pass_on_all_positions(folder: Path) -> None:
    observer = Observer()

    found = token_ids(folder, observer, SPECULATION)

    assert found == token_ids(folder, Observer(), None)
    assert observer.seen[:60] == list(range(60))  # the prompt, chunk by chunk
    assert set(observer.seen) >= set(range(65))
    assert observer.num_proposals


@dataclass
class Hostile:
    """Drafts right and wrong tokens, of any length, for some of the rows."""

    right: Mapping[RequestId, list[int]]  # prompts and answers
    draw: Random = field(default_factory=lambda: Random(0))

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        drafts: dict[RequestId, list[int]] = {}
        for row in rows:
            length = self.draw.randint(0, min(row.max_tokens, max_tokens))
            known = len(row.known_tokens)
            draft = self.right[row.request_id][known : known + length]
            if draft and self.draw.random() < 0.5:
                draft[self.draw.randrange(len(draft))] = self.draw.randrange(60)
            if draft:
                drafts[row.request_id] = draft
                max_tokens -= len(draft)
        return drafts

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        """Do nothing: there is no state by request."""


def answers(
    folder: Path, speculation: Speculation | None, hostile: Hostile
) -> tuple[dict[RequestId, list[int]], SchedulerStats]:
    """Return prompts and answers of requests that share too few blocks."""
    config = RunnerConfig(
        str(folder), kv_cache_bytes=1 << 20, max_num_seqs=4, speculation=speculation
    )
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=CHUNK, num_lookahead_tokens=6)
    sampled = replace(GREEDY, max_tokens=60, ignore_eos=True, temperature=0.8)
    samplings = [
        replace(sampled, temperature=0.0),
        sampled,
        replace(sampled, repetition_penalty=1.2, logprobs=2),
        replace(sampled, stop_token_ids=(7, 8), min_tokens=20, banned_sequences=((5, 6), (9,))),
    ]
    with load_runner(config, drafters={"observed": lambda *_: Drafter(hostile)}) as runner:
        engine = EngineCore(Scheduler(limits, CacheConfig(num_blocks=14)), runner)
        found: dict[RequestId, list[int]] = {}
        for number, sampling in enumerate(samplings):
            name, prompt = RequestId(str(number)), prompt_of(20 + number)
            found[name] = list(prompt)
            engine.scheduler.add(EngineRequest(name, prompt, sampling, seed=number))
        while engine.scheduler.has_work:
            for output in engine.step():
                found[output.request_id] += output.token_ids
        engine.scheduler.check()
        engine.close()
    return found, engine.scheduler.stats()


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_no_draft_changes_an_answer(folder: Path, is_adaptive: bool) -> None:
    right, _ = answers(folder, None, Hostile({}))

    speculation = Speculation(6, method="observed", is_adaptive=is_adaptive)
    found, stats = answers(folder, speculation, Hostile(right))

    assert found == right
    assert 0 < stats.total_accepted_tokens < stats.total_proposed_tokens
    assert stats.total_preemptions > 0


def test_each_method_that_can_be_named_has_a_drafter() -> None:
    assert set(METHODS) == DRAFTERS.keys()
