"""Engine tokens: prefix hits and preemptions change no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.ids import RequestId
from baton.core.output import FinishReason
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.scheduler.config import SchedulerConfig
from tests.support.models import VARIANTS, prompt_of, reference_choices
from tests.support.scaled_kv import grown_folder

BLOCK_SIZE = 16
NUM_TOKENS = 48
FLOAT32 = [name for name, variant in VARIANTS.items() if variant.dtype == "float32"]
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)

FolderOf = Callable[[str], Path]


@pytest.fixture
def engine_of(model_folder: FolderOf) -> Iterator[Callable[..., EngineCore]]:
    """Yield a factory of engines; the scheduler's state is checked after the test."""
    made: list[tuple[EngineCore, TorchRunner]] = []

    def make(
        name: str, *, num_blocks: int = 200, folder: Path | None = None, **settings: str
    ) -> EngineCore:
        """Load a model, with so many blocks for each KV group."""
        path = str(folder or model_folder(name))
        config = RunnerConfig(path, kv_cache_bytes=1 << 20, max_num_seqs=8, **settings)  # type: ignore[arg-type]
        with load_runner(config) as probe:
            block_bytes = len(probe.kv_memory.layout.groups) * probe.kv_memory.block_bytes
        runner = load_runner(replace(config, kv_cache_bytes=num_blocks * block_bytes))
        scheduling = SchedulerConfig(max_num_batched_tokens=40, max_num_seqs=8)
        made.append((build_engine(runner, EngineOptions(scheduling)), runner))
        return made[-1][0]

    yield make
    for engine, runner in made:
        engine.scheduler.check()
        assert engine.scheduler.stats().num_free_blocks == engine.scheduler.stats().num_blocks
        runner.__exit__(None, None, None)


def engine_request(
    name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, salt: str = ""
) -> EngineRequest:
    return EngineRequest(RequestId(name), tuple(prompt), sampling, seed=11, cache_salt=salt)


def run(engine: EngineCore, *requests: EngineRequest) -> list[list[int]]:
    for each in requests:
        engine.scheduler.add(each)
    tokens: dict[RequestId, list[int]] = {each.request_id: [] for each in requests}
    while engine.scheduler.has_work:
        for output in engine.step():
            assert output.finish_reason in (None, FinishReason.LENGTH), output
            tokens[output.request_id] += output.token_ids
    return [tokens[each.request_id] for each in requests]


@pytest.mark.parametrize("name", FLOAT32)
def test_a_prefix_hit_changes_no_token(
    name: str, engine_of: Callable[..., EngineCore], model_folder: FolderOf
) -> None:
    engine = engine_of(name)
    first = prompt_of(60)
    longer = (*first[:48], *prompt_of(9, seed=5))  # three whole blocks in common
    run(engine, engine_request("first", first, replace(GREEDY, max_tokens=1)))

    again, branched = run(
        engine, engine_request("again", first), engine_request("branched", longer)
    )

    folder = model_folder(name)
    assert again == reference_choices(folder, first, again, NUM_TOKENS)
    assert branched == reference_choices(folder, longer, branched, NUM_TOKENS)
    assert engine.scheduler.stats().total_prefix_hit_tokens == 48 + 48


def test_long_prompts_of_dynamic_rope_share_blocks_only_with_the_same_length(
    engine_of: Callable[..., EngineCore], model_folder: FolderOf
) -> None:
    name = "llama-rope-dynamic"  # made for 64 positions; longer prompts turn all of theirs
    engine = engine_of(name)
    first, longer = prompt_of(90), (*prompt_of(90), *prompt_of(20, seed=5))
    run(engine, engine_request("first", first))

    again, stretched = run(
        engine, engine_request("again", first), engine_request("stretched", longer)
    )

    folder = model_folder(name)
    assert again == reference_choices(folder, first, again, NUM_TOKENS)
    assert stretched == reference_choices(folder, longer, stretched, NUM_TOKENS)
    assert engine.scheduler.stats().total_prefix_hit_tokens == 80


@pytest.mark.parametrize("name", FLOAT32)
def test_a_cache_too_small_for_all_preempts_and_changes_no_token(
    name: str, engine_of: Callable[..., EngineCore], model_folder: FolderOf
) -> None:
    # Four requests of up to 7 blocks each, and room for about two of them. With windows, most
    # blocks become free while the requests run.
    engine = engine_of(name, num_blocks=9 if name.endswith("window") else 17)
    prompts = [prompt_of(length) for length in (1, 17, 40, 62)]

    answers = run(engine, *(engine_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)))

    assert answers == [
        reference_choices(model_folder(name), prompt, answer, NUM_TOKENS)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert engine.scheduler.stats().total_preemptions > 0


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_kv_of_bytes_changes_no_token_by_hits_chunks_or_preemption(
    kv_cache_dtype: str, engine_of: Callable[..., EngineCore], tmp_path: Path
) -> None:
    growth = torch.tensor([64.0, 96.0])
    scales = {"k_scale": growth, "v_scale": 2 * growth}
    folder = grown_folder(tmp_path, growth, scales)
    engine, small = (
        engine_of(
            "", num_blocks=number, folder=folder, kv_cache_dtype=kv_cache_dtype, dtype="bfloat16"
        )
        for number in (200, 17)
    )
    prompts = [prompt_of(length) for length in (1, 17, 40, 62)]
    requests = [engine_request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]

    alone = [run(engine, each)[0] for each in requests]
    again = run(engine, *requests)
    preempted = run(small, *requests)

    assert alone == again == preempted
    assert engine.scheduler.stats().total_prefix_hit_tokens > 0
    assert small.scheduler.stats().total_preemptions > 0


def test_seeded_tokens_do_not_change_by_preemption_or_batching(
    engine_of: Callable[..., EngineCore],
) -> None:
    requests = [engine_request(f"r{i}", prompt_of(20 + 9 * i), SEEDED) for i in range(5)]
    roomy = engine_of("llama")
    alone = [run(roomy, each)[0] for each in requests]
    crowded = engine_of("llama", num_blocks=17)

    together = run(crowded, *requests)

    assert together == alone
    assert crowded.scheduler.stats().total_preemptions > 0
    assert len({tuple(tokens) for tokens in together}) == len(requests)
