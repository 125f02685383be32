"""Engines on runners of small models, and requests of many kinds for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from baton.core.ids import RequestId
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.core import EngineCore
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.plan import Runner
from baton.engine.runner.load import load_runner
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.structured_output.grammar import Bits, Matcher
from tests.support.device_runners import config_of
from tests.support.models import EOS_TOKEN_ID, prompt_of

CHUNK = 24
POISON = 300  # the token whose embedding is NaN
CACHE = CacheConfig(100, 16, enable_prefix_caching=False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=0.8, top_p=0.9)

Answers = dict[str, list[Output]]


def poisoned_copy(folder: Path, target: Path) -> Path:
    """Return a copy of a model with one token whose embedding is NaN."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[name][POISON] = torch.nan
    save_file(tensors, target / "model.safetensors")
    return target


@dataclass(slots=True)
class NextTokens:
    """Grammar and matcher: each token is one of the nine that follow the one before."""

    newest: int = 40

    def matcher(self) -> Matcher:
        return NextTokens()

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert self.newest < token_id < self.newest + 10
            self.newest = token_id

    def try_advance(self, token_id: int) -> bool:
        raise NotImplementedError  # there are no drafts

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def fill(self, allowed: Bits) -> None:
        allowed.fill(0)
        for token_id in range(self.newest + 1, self.newest + 10):
            allowed.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def requests_of(*samplings: SamplingParams, length: int = 3) -> list[EngineRequest]:
    return [
        EngineRequest(RequestId(str(n)), prompt_of(length + n), sampling, seed=n)
        for n, sampling in enumerate(samplings)
    ]


def engine_of(
    runner: Runner,
    cache: CacheConfig = CACHE,
    *,
    async_scheduling: bool = True,
    num_lookahead_tokens: int = 0,
) -> EngineCore:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        max_model_len=128,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        async_scheduling=async_scheduling,
        num_lookahead_tokens=num_lookahead_tokens,
    )
    return EngineCore(Scheduler(config, cache), runner)


def add_requests(engine: EngineCore, requests: Sequence[EngineRequest]) -> None:
    for request in requests:
        engine.scheduler.add(request)
        if request.sampling.structured_outputs is not None:
            engine.scheduler.add_grammar(request, NextTokens())


def run_to_end(engine: EngineCore) -> Answers:
    """Run all requests to their end, and the passes that are launched after it."""
    found: Answers = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def answers(engine: EngineCore, requests: Sequence[EngineRequest]) -> Answers:
    """Run requests to their end, and close the engine."""
    add_requests(engine, requests)
    found = run_to_end(engine)
    engine.close()
    engine.scheduler.check()
    return found


def answers_on_the_cpu(folder: Path, requests: Sequence[EngineRequest]) -> Answers:
    with load_runner(config_of(folder)) as runner:
        return answers(engine_of(runner, async_scheduling=False), requests)


def without_logprobs(answered: Answers) -> Answers:
    """Return outputs without the logprobs, which differ between devices in their last bits."""
    return {
        name: [output._replace(logprobs=(), prompt_logprobs=()) for output in outputs]
        for name, outputs in answered.items()
    }
