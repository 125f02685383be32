"""Drafters that compute inside the passes of a runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.engine.core import EngineCore
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


def test_each_method_that_can_be_named_has_a_drafter() -> None:
    assert set(METHODS) == DRAFTERS.keys()
