"""Drafters that compute inside the passes of a runner, and proposers whose drafts are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.engine.core import EngineCore
from baton.engine.events import SchedulerStats
from baton.engine.kv_cache.groups import CacheConfig
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
from baton.engine.spec_decode.proposer import DraftRow, Drafts, Proposer
from tests.support.hypothesis_profiles import num_examples
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


Draft = Callable[[Random, Sequence[int], int], Sequence[int]]


def some_wrong(draw: Random, right: Sequence[int], max_tokens: int) -> Sequence[int]:
    draft = list(right[: draw.randint(0, max_tokens)])
    if draft and draw.random() < 0.5:
        draft[draw.randrange(len(draft))] = draw.randrange(60)
    return draft


def no_tokens_of_the_model(draw: Random, right: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Right tokens, then one that the vocabulary does not have."""
    return [*right[: draw.randrange(max_tokens)], draw.choice([-1, -(1 << 40), 320, 1 << 40])]


def too_many(draw: Random, right: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Right ones beyond the blocks, and others beyond `max_tokens` and the longest sequence."""
    return [*right, *draw.choices(range(60), k=draw.choice([1, 20, 600]))]


def failing(draw: Random, right: Sequence[int], max_tokens: int) -> Sequence[int]:
    if draw.random() < 0.3:
        raise ZeroDivisionError("no drafts")
    return right[:max_tokens]


DRAFTS: Mapping[str, Draft] = {
    "wrong": some_wrong,
    "no tokens of the model": no_tokens_of_the_model,
    "too many": too_many,
    "empty": lambda *_: (),
    "failing": failing,
}


@dataclass
class Hostile:
    """Drafts of these kinds, other ones in each call, also for rows that it was not asked about."""

    right: Mapping[RequestId, list[int]]  # prompts and answers
    kinds: Sequence[Draft]
    draw: Random
    fails_to_forget: bool = False

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        kind, drafts = self.draw.choice(self.kinds), dict[RequestId, Sequence[int]]()
        asked = {row.request_id: row for row in rows}
        for name in (*self.right, RequestId("unknown")):  # running, waiting, ended and unknown
            row = asked.get(name)
            known = 0 if row is None else len(row.known_tokens)
            at_most = 6 if row is None else row.max_tokens
            drafts[name] = kind(self.draw, self.right.get(name, [7] * 9)[known:], at_most)
        return drafts

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        if self.fails_to_forget:
            raise ZeroDivisionError("nothing is forgotten")


def answers(
    folder: Path, speculation: Speculation | None, proposer: Proposer
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
    drafters = {name: lambda *_: Drafter(proposer) for name in ("observed", "suffix")}
    with load_runner(config, drafters=drafters) as runner:
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


@pytest.fixture(scope="module")
def right(folder: Path) -> Mapping[RequestId, list[int]]:
    """Return the prompts with the answers that requests get without drafts."""
    found, _ = answers(folder, None, Observer())
    return found


@pytest.mark.parametrize("kind", sorted(DRAFTS.keys() - {"empty"}))
def test_no_draft_changes_an_answer(
    kind: str, folder: Path, right: Mapping[RequestId, list[int]]
) -> None:
    hostile = Hostile(right, [DRAFTS[kind]], Random(0))

    found, stats = answers(folder, Speculation(6, method="observed", is_adaptive=False), hostile)

    assert found == right
    assert stats.total_accepted_tokens > 0
    assert (stats.total_accepted_tokens < stats.total_proposed_tokens) is (kind == "wrong")
    assert stats.total_preemptions > 0


@pytest.mark.parametrize("method", ["observed", "suffix"])
@pytest.mark.parametrize("seed", range(num_examples(2)))
def test_no_proposer_changes_an_answer(
    method: str, seed: int, folder: Path, right: Mapping[RequestId, list[int]]
) -> None:
    """One that computes its drafts, and one that looks them up and is asked for more."""
    hostile = Hostile(right, list(DRAFTS.values()), Random(seed), fails_to_forget=True)

    found, _ = answers(folder, Speculation(6, method=method), hostile)

    assert found == right


def test_each_method_that_can_be_named_has_a_drafter() -> None:
    assert set(METHODS) == DRAFTERS.keys()
