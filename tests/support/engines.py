"""Engines over the fake runner, with defaults for everything but the point of a test."""

from __future__ import annotations

from engine.core import EngineCore, NoKvWorker
from engine.kv_seam import KvWorker
from engine.plan import Runner
from engine.request import ClientId, RequestId, RequestSpec
from engine.sampling import SamplingParams
from engine.scheduler import Scheduler
from engine.scheduler_config import CacheConfig, SchedulerConfig
from tests.support.fake_runner import FakeRunner, KvTensor

VOCAB_SIZE = 1000


def an_engine(
    *, num_blocks: int = 64, runner: Runner | None = None, kv_worker: KvWorker | None = None
) -> EngineCore:
    cache = CacheConfig(num_blocks=num_blocks, block_size=4)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=8, vocab_size=VOCAB_SIZE), cache)
    fake = FakeRunner(KvTensor(num_blocks, cache.block_size), VOCAB_SIZE)
    return EngineCore(scheduler, runner or fake, kv_worker or NoKvWorker())


def a_spec(
    name: str = "a", *, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4, client: str = "me"
) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return RequestSpec(RequestId(name), prompt, sampling, seed=0, client_id=ClientId(client))
