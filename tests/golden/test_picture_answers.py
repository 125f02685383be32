"""Greedy answers to prompts with pictures equal those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest
from baton.core.ids import RequestId
from baton.core.media import MediaSegment, encoding_rows
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine, stored_rows
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.load import load_runner, load_tower_runner
from baton.engine.runner.model_info import NO_LAYER
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.vision.read_config import read_vision_config
from baton.engine.scheduler.config import SchedulerConfig
from baton.kv_transfer.fence import Fence
from tests.support.gguf_towers import write_gguf_with_tower
from tests.support.local_handoffs import LocalHandoffs
from tests.support.models import prompt_of
from tests.support.vision import (
    PICTURE_SIZES,
    a_picture,
    generated_with_pictures,
    make_vision_folder,
)

NAMES = (
    "smolvlm",
    "idefics3",
    "mistral3",
    "gemma3",
    "gemma4",
    "gemma4-large",
    "gemma4-unified",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3.5-vl",
)
# Tokens of a step, where pictures must not be cut: the last is a picture of 16, and a decode.
CHUNKS_OF = dict.fromkeys(("gemma3", "gemma4-large", "gemma4-unified"), (1 << 10, 36, 20, 17))
NUM_TOKENS = 8
BLOCK_SIZE = 4
PLACEHOLDER = 7
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    return cache(lambda name: make_vision_folder(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="module")
def runner_of(folder_of: FolderOf) -> Iterator[Callable[..., TorchRunner]]:
    with ExitStack() as stack:

        @cache
        def load(
            name: str, *, loads_tower: bool = True, kv: str = "auto", dtype: str = "float32"
        ) -> TorchRunner:
            config = config_for(folder_of(name), kv_cache_dtype=kv, dtype=dtype)
            return stack.enter_context(load_runner(replace(config, loads_tower=loads_tower)))

        yield load


def config_for(folder: Path, **settings: Any) -> RunnerConfig:
    return RunnerConfig(
        str(folder),
        **{
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "kv_cache_bytes": 8 << 20,
            "max_model_len": 512,
            **settings,
        },
    )


def an_engine(runner: TorchRunner, chunk: int = 512, num_rows: int = 512) -> EngineCore:
    scheduling = SchedulerConfig(
        max_num_batched_tokens=chunk, max_num_seqs=2, encoder_cache_tokens=num_rows
    )
    return build_engine(runner, EngineOptions(scheduling))


def a_request(folder: Path, name: str, seeds: Sequence[int], words: int = 3) -> EngineRequest:
    """Return a prompt with text around a picture for each seed, of various sizes."""
    vision = read_vision_config(SafetensorsFolder(folder))
    assert vision is not None
    sizes = PICTURE_SIZES[name]
    pictures = [a_picture(*sizes[seed % len(sizes)], seed=seed) for seed in seeds]
    token_ids, media = list(prompt_of(words)), list[MediaSegment]()
    for picture in pictures:
        rows, columns = vision.token_grid(picture.height, picture.width)
        num_tokens = rows * columns
        media.append(MediaSegment(len(token_ids), num_tokens, picture.digest, 0, columns))
        token_ids += [PLACEHOLDER] * num_tokens
        token_ids += prompt_of(words)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    distinct = {picture.digest: picture for picture in pictures}
    return EngineRequest(
        RequestId(f"r{seeds}"),
        tuple(token_ids),
        sampling,
        seed=0,
        media=tuple(media),
        pictures=tuple(distinct.values()),
    )


class LayerCounter:
    """Pass hook that counts what it is told."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def layer_done(self, layer: int, fence: Fence) -> None:
        self.layers.append(layer)

    def pass_done(self) -> None: ...


def answers(engine: EngineCore, *requests: EngineRequest) -> list[list[int]]:
    found: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    num_left = len(requests)
    while num_left:
        for output in engine.step():
            assert output.failure is None, output
            found[output.request_id] += output.token_ids
            num_left -= output.finish_reason is not None
        engine.scheduler.check()
    return list(found.values())


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_transformers_for_any_chunks(
    name: str, folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    folder, runner = folder_of(name), runner_of(name)
    request = a_request(folder, name, [0, 1, 2])
    expected = generated_with_pictures(folder, request)

    for chunk in CHUNKS_OF.get(name, (1 << 10, 20, 7, 2)):  # most cut pictures
        # Without room for all encodings, they take turns.
        rows = max(segment.num_tokens for segment in request.media)
        assert answers(an_engine(runner, chunk, rows), request) == [expected]
    assert len(set(expected)) > 2
    # As after a migration, of which this engine knows the prompt.
    later = replace(
        request, request_id=RequestId("later"), prior_output_token_ids=tuple(expected[:3])
    )
    engine = an_engine(runner, chunk=24)
    assert answers(engine, request, later) == [expected, expected[3:]]
    # The pictures matter, and so does their order.
    others = replace(a_request(folder, name, [0, 1, 5]), request_id=RequestId("other"))
    assert answers(an_engine(runner), others) != [expected]


@pytest.mark.parametrize("name", NAMES)
def test_prefix_hits_and_batches_change_no_answer(
    name: str, folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    folder, engine = folder_of(name), an_engine(runner_of(name), chunk=24)
    # The same picture at two places, and the same text around others.
    requests = [a_request(folder, name, seeds) for seeds in ([0, 0], [0, 3], [3, 0], [0, 0, 1])]
    alone = [answers(an_engine(runner_of(name)), request)[0] for request in requests]

    assert answers(engine, *requests) == alone
    again = [replace(each, request_id=RequestId(f"again {each.request_id}")) for each in requests]
    assert answers(engine, *again) == alone
    assert engine.scheduler.stats().total_prefix_hit_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_decode_node_without_tower_and_pixels_continues_the_answer(
    name: str, folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    request = a_request(folder_of(name), name, [0, 1])
    blind = runner_of(name, loads_tower=False)
    assert not blind.info.encodes_pictures
    assert blind.info.fingerprint == runner_of(name).info.fingerprint
    expected = generated_with_pictures(folder_of(name), request)

    with LocalHandoffs(runner_of(name), [blind], chunk=20) as nodes:
        answer = nodes.answer(
            request.prompt_token_ids, NUM_TOKENS, media=request.media, pictures=request.pictures
        )

    assert answer.token_ids == expected
    assert answer.num_received


@pytest.mark.parametrize(
    ("name", "kv", "dtype"),
    [*((name, "auto", "float32") for name in NAMES), ("qwen3-vl", "int8", "bfloat16")],
)
def test_a_node_without_tower_takes_encodings_from_an_encode_node(
    name: str, kv: str, dtype: str, folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    folder, blind = folder_of(name), runner_of(name, loads_tower=False, kv=kv, dtype=dtype)
    request = a_request(folder, name, [0, 1, 0])
    if kv == "auto":
        expected = generated_with_pictures(folder, request)
    else:
        [expected] = answers(an_engine(runner_of(name, kv=kv, dtype=dtype)), request)
    num_rows = encoding_rows(request.media)

    with load_tower_runner(config_for(folder, kv_cache_dtype=kv, dtype=dtype)) as tower:
        assert tower.info.fingerprint == blind.info.fingerprint
        rows = stored_rows(tower)
        assert rows is not None
        assert rows == stored_rows(blind)
        with LocalHandoffs(tower, [blind], chunk=24) as nodes:
            stored = [rows.prompt(each.digest, num_rows[each.digest]) for each in request.pictures]
            for prompt, picture in zip(stored, request.pictures, strict=True):
                nodes.encode(prompt, picture)
            answer = nodes.answer_alone(replace(request, pictures=()))

    assert answer.token_ids == expected


@pytest.mark.parametrize(
    "name",
    ["smolvlm", "gemma3", "gemma4", "gemma4-large", "qwen2-vl", "qwen2.5-vl", "qwen3-vl"],
)
def test_files_of_llama_cpp_give_the_answers_of_the_folder(
    name: str, folder_of: FolderOf, runner_of: Callable[..., TorchRunner], tmp_path: Path
) -> None:
    path = write_gguf_with_tower(folder_of(name), tmp_path)
    request = a_request(folder_of(name), name, [0, 1])
    config = RunnerConfig(str(path), dtype="float32", kv_cache_bytes=8 << 20, max_model_len=512)

    with load_runner(config) as runner:
        assert answers(an_engine(runner), request) == answers(an_engine(runner_of(name)), request)


@pytest.mark.parametrize(("name", "chunk"), [("smolvlm", 5), ("gemma3", 17)])
def test_int8_kv_of_pictures_gives_the_answers_that_a_node_alone_gives(
    name: str, chunk: int, folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    runner = runner_of(name, kv="int8")
    request = a_request(folder_of(name), name, [0, 1])
    alone = answers(an_engine(runner), request)

    assert answers(an_engine(runner, chunk), request) == alone


@pytest.mark.parametrize("name", NAMES)
def test_the_native_kernels_give_the_same_answer_for_any_chunks_and_batches(
    name: str, folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    runner = runner_of(name, dtype="bfloat16")
    requests = [a_request(folder_of(name), name, seeds) for seeds in ([0, 1], [1, 0])]
    alone = [answers(an_engine(runner), request)[0] for request in requests]

    for chunk in CHUNKS_OF.get(name, (24, 5)):
        assert answers(an_engine(runner, chunk), *requests) == alone


def test_layers_of_the_tower_are_progress_that_sends_nothing(
    folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    runner = runner_of("smolvlm")
    engine = an_engine(runner)
    runner.hook = counter = LayerCounter()
    answers(engine, a_request(folder_of("smolvlm"), "smolvlm", [70, 71]))  # new pictures
    runner.hook = None

    num_tower_layers = 2 * 3  # of two pictures
    assert counter.layers[:num_tower_layers] == [NO_LAYER] * num_tower_layers
    assert NO_LAYER not in counter.layers[num_tower_layers:]


def test_the_native_kernels_show_pictures_whole(
    folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    request = a_request(folder_of("gemma3"), "gemma3", [0, 1])

    found, expected = (
        prompt_logprobs(runner_of("gemma3", dtype=dtype), request)
        for dtype in ("bfloat16", "float32")
    )

    # If a picture's tokens saw only those before them, numbers would differ by 0.13.
    assert found == pytest.approx(expected, abs=0.02)


def prompt_logprobs(runner: TorchRunner, request: EngineRequest) -> list[float]:
    engine, found = an_engine(runner, chunk=20), list[float]()
    sampling = replace(request.sampling, max_tokens=1, prompt_logprobs=0)
    engine.scheduler.add(replace(request, sampling=sampling))
    while len(found) < len(request.prompt_token_ids) - 1:
        for output in engine.step():
            found += [each.logprob for each in output.prompt_logprobs if each is not None]
    return found


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("preprocessor_config.json", {"image_mean": [0.4, 0.5, 0.46]}),
        ("preprocessor_config.json", {"do_normalize": False}),
        ("config.json", {"vision_config": {"layer_norm_eps": 1e-5}}),
    ],
)
def test_what_changes_encodings_changes_the_fingerprint(
    file: str,
    fields: dict[str, Any],
    folder_of: FolderOf,
    runner_of: Callable[..., TorchRunner],
    tmp_path: Path,
) -> None:
    shutil.copytree(folder_of("smolvlm"), tmp_path, dirs_exist_ok=True)
    found = json.loads((tmp_path / file).read_text())
    for name, value in fields.items():
        found[name] = {**found[name], **value} if isinstance(value, dict) else value
    (tmp_path / file).write_text(json.dumps(found))
    config = RunnerConfig(str(tmp_path), dtype="float32", kv_cache_bytes=8 << 20, loads_tower=False)

    with load_runner(config) as changed:
        assert changed.info.fingerprint != runner_of("smolvlm").info.fingerprint


def test_pictures_that_the_tower_cannot_encode_are_refused_before_a_pass(
    folder_of: FolderOf, runner_of: Callable[..., TorchRunner]
) -> None:
    engine = an_engine(runner_of("mistral3"))
    request = a_request(folder_of("mistral3"), "mistral3", [0])
    [picture], [segment] = request.pictures, request.media
    narrow = replace(picture, width=picture.width - 1, rgb=picture.rgb[: -3 * picture.height])
    long = replace(segment, num_tokens=segment.num_tokens + 1)

    with pytest.raises(InvalidRequest, match="multiples of 28"):
        engine.scheduler.add(replace(request, pictures=(narrow,)))
    with pytest.raises(InvalidRequest, match="tokens in this model"):
        engine.scheduler.add(replace(request, media=(long,)))
