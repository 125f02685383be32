"""Prompts of a model's own embedding rows give the answers that their token ids give."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.load import load_runner
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.open_runner import open_runner
from baton.engine.scheduler.config import SchedulerConfig
from baton.router.prompt_embeds import prompt_of_embeds
from tests.support.encoders import make_encoder
from tests.support.local_handoffs import LocalHandoffs
from tests.support.models import VARIANTS, prompt_of
from tests.support.vision import make_vision_folder

NUM_TOKENS = 8
BLOCK_SIZE = 16
# One embedding, parts of a block, and several segments of rows.
LENGTHS = (1, 40, 300)
NAMES = (
    "qwen3",
    "llama",
    "gemma2",
    "gemma3",
    "granite",
    "qwen3-next",
)  # half of them scale embeddings
RunnerOf = Callable[..., TorchRunner]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def runner_of(
    model_folder: Callable[[str], Path], family_folder: Callable[[str], Path]
) -> Iterator[RunnerOf]:
    with ExitStack() as stack:

        @cache
        def load(name: str, **settings: Any) -> TorchRunner:
            folder = (model_folder if name in VARIANTS else family_folder)(name)
            config = config_for(folder, **settings)
            return stack.enter_context(load_runner(config))

        yield load


def config_for(folder: Path, **settings: Any) -> RunnerConfig:
    sizes: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 8 << 20, "max_model_len": 512}
    own = {"block_size": BLOCK_SIZE, "enable_prompt_embeds": True}
    return RunnerConfig(str(folder), **{**sizes, **own, **settings})


def an_engine(runner: TorchRunner, chunk: int = 512, num_rows: int = 512) -> EngineCore:
    scheduling = SchedulerConfig(
        max_num_batched_tokens=chunk, max_num_seqs=4, encoder_cache_tokens=num_rows
    )
    return build_engine(runner, EngineOptions(scheduling))


def rows_of(runner: TorchRunner, token_ids: tuple[int, ...]) -> torch.Tensor:
    """Return what the first layer takes for these tokens."""
    assert isinstance(runner.decoder, Decoder)
    with torch.inference_mode():
        return runner.decoder.embed(torch.tensor(token_ids)).clone()


def encoded(rows: torch.Tensor) -> str:
    return base64.b64encode(save({"prompt_embeds": rows.contiguous()})).decode()


def request_of(name: str, token_ids: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(RequestId(name), token_ids, GREEDY, seed=0)


def embedded(name: str, rows: torch.Tensor) -> EngineRequest:
    prompt = prompt_of_embeds(encoded(rows), rows.shape[1], 512)
    request = request_of(name, prompt.token_ids)
    return replace(request, media=prompt.media, pictures=prompt.pictures)


def answers(engine: EngineCore, *requests: EngineRequest) -> list[list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.has_work:
        for output in engine.step():
            assert output.failure is None, output.failure
            tokens[output.request_id] += output.token_ids
    engine.scheduler.check()
    return list(tokens.values())


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_token_ids(name: str, runner_of: RunnerOf) -> None:
    runner = runner_of(name)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    requests = [request_of(f"t{len(prompt)}", prompt) for prompt in prompts]
    given = [embedded(f"e{len(prompt)}", rows_of(runner, prompt)) for prompt in prompts]
    wanted = [answers(an_engine(runner), request)[0] for request in requests]

    assert [answers(an_engine(runner), each)[0] for each in given] == wanted
    for chunk, num_rows in ((512, 512), (24, 512), (24, 128)):
        engine = an_engine(runner, chunk, num_rows)
        assert answers(engine, *given) == wanted
        assert (
            answers(
                engine,
                *(replace(each, request_id=RequestId(f"{each.request_id}b")) for each in given),
            )
            == wanted
        )  # with prefix hits
        if name != "qwen3-next":  # which continues from snapshots of its state alone
            assert engine.scheduler.stats().total_prefix_hit_tokens > 0


def test_equal_beginnings_share_blocks_and_others_do_not(runner_of: RunnerOf) -> None:
    runner = runner_of("qwen3")
    engine, prompt = an_engine(runner), prompt_of(300)
    rows = rows_of(runner, prompt)
    answers(engine, embedded("a", rows))

    def num_hits(request: EngineRequest) -> int:
        before = engine.scheduler.stats().total_prefix_hit_tokens
        answers(engine, request)
        return engine.scheduler.stats().total_prefix_hit_tokens - before

    assert num_hits(request_of("tokens", prompt)) == 0
    assert num_hits(request_of("placeholders", (0,) * 300)) == 0
    changed = rows.clone()
    changed[200] += 1e-3
    assert num_hits(embedded("changed", changed)) == 128
    changed[0] += 1e-3
    assert num_hits(embedded("other", changed)) == 0
    assert num_hits(embedded("again", rows)) >= 256


def test_embeddings_that_are_no_tokens_and_half_precision(runner_of: RunnerOf) -> None:
    """Rows in bfloat16 and float16 are those numbers, whatever the model computes in."""
    runner = runner_of("qwen3")
    torch.manual_seed(5)
    rows = torch.randn(40, runner.info.hidden_size).bfloat16()
    [found] = answers(an_engine(runner), embedded("a", rows))
    [same] = answers(an_engine(runner), embedded("b", rows.float()))
    [short] = answers(an_engine(runner), embedded("c", rows.half()))

    assert found == same == short


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_decode_node_without_embeddings_continues_the_answer(
    name: str, runner_of: RunnerOf
) -> None:
    runner, blind = runner_of(name), runner_of(name, loads_tower=False)
    plain = runner_of(name, enable_prompt_embeds=False)
    prompt = prompt_of(300)
    given = embedded("a", rows_of(runner, prompt))
    [wanted] = answers(an_engine(runner), request_of("t", prompt))
    assert blind.info.fingerprint == runner.info.fingerprint == plain.info.fingerprint

    for decode in (blind, plain):
        with LocalHandoffs(runner, [decode], chunk=20) as nodes:
            answer = nodes.answer(
                given.prompt_token_ids, NUM_TOKENS, media=given.media, pictures=given.pictures
            )
        assert answer.token_ids == wanted
        assert answer.num_received


def test_preempted_prompts_take_their_rows_again(runner_of: RunnerOf) -> None:
    runner = runner_of("qwen3")
    prompts = [prompt_of(60, seed=seed) for seed in range(3)]
    given = [embedded(f"e{index}", rows_of(runner, each)) for index, each in enumerate(prompts)]
    wanted = [answers(an_engine(runner), each)[0] for each in given]
    # All prompts fit, and their answers do not.
    small = runner_of("qwen3", kv_cache_bytes=13 * runner.kv_memory.block_bytes)
    engine = an_engine(small, chunk=64)

    assert answers(engine, *given) == wanted
    assert engine.scheduler.stats().total_preemptions > 0


def test_nodes_without_the_option_and_wrong_sizes_are_refused(runner_of: RunnerOf) -> None:
    runner = runner_of("qwen3")
    given = embedded("a", rows_of(runner, prompt_of(5)))
    narrow = embedded("b", torch.zeros(5, 8))
    plain = an_engine(runner_of("qwen3", enable_prompt_embeds=False))
    pixels = replace(given.pictures[0], dtype="", rgb=bytes(3 * 5 * 64))

    for engine, request, message in (
        (plain, given, "encodes no pictures"),
        (an_engine(runner), narrow, "embeddings of 8 numbers; this model's have 64"),
        (an_engine(runner), replace(given, pictures=(pixels,)), "takes no pictures in prompts"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.scheduler.validate(request)


def test_models_whose_layers_take_more_than_embeddings_are_refused(
    family_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("gemma4", "qwen3.5"):
        with pytest.raises(InvalidConfig, match="--enable-prompt-embeds"):
            load_runner(config_for(family_folder(name)))
    with pytest.raises(InvalidConfig, match="takes images"):
        load_runner(config_for(make_vision_folder(tmp_path / "vision", "smolvlm")))
    (tmp_path / "bert").mkdir()
    make_encoder(tmp_path / "bert", "bert")
    with pytest.raises(InvalidConfig, match="an encoder: it takes no --enable-prompt-embeds"):
        open_runner(config_for(tmp_path / "bert"))
