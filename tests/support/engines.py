"""Builders of engines with the fake runner."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Runner, StepObserver
from baton.engine.scheduler.config import LoadFailurePolicy, SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.driver import KvDriver
from tests.support.fake_runner import FakeRunner, KvTensor

VOCAB_SIZE = 1000
EOS_TOKEN_ID = VOCAB_SIZE - 1


def an_engine(
    *,
    num_blocks: int = 64,
    runner: Runner | None = None,
    drivers: Sequence[KvDriver] = (),
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
    observers: Sequence[StepObserver] = (),
) -> EngineCore:
    cache = CacheConfig(num_blocks=num_blocks, block_size=4)
    config = SchedulerConfig(
        max_num_seqs=8,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        kv_load_failure_policy=load_failure,
    )
    scheduler = Scheduler(config, cache)
    fake = FakeRunner(KvTensor(num_blocks, cache.block_size), VOCAB_SIZE)
    return EngineCore(scheduler, runner or fake, drivers, observers=observers)


def an_engine_request(
    name: str = "a",
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 4,
    form: StructuredOutputs | None = None,
) -> EngineRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=form is None, structured_outputs=form
    )
    return EngineRequest(RequestId(name), prompt, sampling, seed=0)
