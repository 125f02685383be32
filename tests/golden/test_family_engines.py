"""Each model family in engines: prefix hits, hand-offs and a decode engine that dies.

The tokens are those of transformers. Chunks are odd, and KV moves through NIXL by layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.core import EngineCore
from engine.factory import EngineOptions, build_engine
from engine.request import EngineRequest, RequestId
from engine.runner.model_runner import TorchRunner
from engine.sampling import SamplingParams
from engine.scheduler.config import SchedulerConfig
from tests.support.families import FAMILY_VARIANTS
from tests.support.local_handoffs import LocalHandoffs
from tests.support.models import prompt_of, reference_greedy

CHUNK = 23  # tokens of a step, no multiple of a block
NUM_TOKENS = 16
NUM_BEFORE_DEATH = 6
PROMPT = prompt_of(70)  # four blocks and six tokens

LoadRunner = Callable[..., TorchRunner]

each_family = pytest.mark.parametrize("name", FAMILY_VARIANTS)


def answer(engine: EngineCore, name: str, prompt: tuple[int, ...]) -> list[int]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    engine.scheduler.add(EngineRequest(RequestId(name), prompt, sampling, seed=0))
    tokens: list[int] = []
    while engine.scheduler.has_work:
        for outputs in engine.step().values():
            tokens += [token for output in outputs for token in output.token_ids]
    return tokens


@each_family
def test_prefix_hits_change_no_token(
    name: str, family_runner: LoadRunner, family_folder: Callable[[str], Path]
) -> None:
    scheduling = SchedulerConfig(max_num_batched_tokens=CHUNK, max_num_seqs=4)
    engine = build_engine(family_runner(name), EngineOptions(scheduling))
    branched = (*PROMPT[:48], *prompt_of(9, seed=5))
    first = answer(engine, "first", PROMPT)

    again, other = answer(engine, "again", PROMPT), answer(engine, "branched", branched)

    assert engine.scheduler.stats().total_prefix_hit_tokens == 64 + 48
    assert first == again == reference_greedy(family_folder(name), PROMPT, NUM_TOKENS)
    assert other == reference_greedy(family_folder(name), branched, NUM_TOKENS)


@each_family
def test_hand_offs_and_the_death_of_a_decode_engine_change_no_token(
    name: str, family_runner: LoadRunner, family_folder: Callable[[str], Path]
) -> None:
    expected = reference_greedy(family_folder(name), PROMPT, NUM_TOKENS)
    decodes = [family_runner(name, copy=copy) for copy in ("decode-0", "decode-1")]
    with LocalHandoffs(family_runner(name), decodes, chunk=CHUNK) as engines:
        whole = engines.answer(PROMPT, NUM_TOKENS)
        pushes_layers = engines.prefill.sends_before_the_end()

        begun = engines.answer(PROMPT, NUM_TOKENS, until=NUM_BEFORE_DEATH)
        engines.kill_decode()
        rest = engines.answer(PROMPT, NUM_TOKENS, prior=begun.token_ids)

    assert whole.token_ids == expected
    assert pushes_layers
    assert begun.token_ids + rest.token_ids == expected
    assert whole.num_received == len(PROMPT)
    assert rest.num_received == len(PROMPT) + len(begun.token_ids)
