"""The demo model that sees reads numbers, which wrong pictures, positions or caches change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="baton[images] is not installed")
pytest.importorskip("matplotlib", reason="baton[plots], which has fonts, is not installed")

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.load import load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.scheduler.config import SchedulerConfig
from baton.prompt_images import ImagePrompts
from baton.router.pictures.families.table import read_format
from tests.support.local_handoffs import LocalHandoffs
from tools.number_pictures import draw

FOLDER = Path(__file__).parents[2] / "models" / "demo-vision"
NUMBERS = ("27", "481", "9036", "15")
QUESTION = "Which number is in the picture?"
OF_TWO = ("Which number is in the first picture?", "Which number is in the second picture?")
MAX_TOKENS = 6
PICTURE_TOKENS = 16
CHUNKS = (512, 7)  # tokens of a step; the small ones cut each picture

Turn = tuple[tuple[str, ...], str]  # the numbers of the pictures that it shows, and its text


@pytest.fixture(scope="module")
def lifetime() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def load(
    lifetime: ExitStack, *, loads_tower: bool = True, activation_dtype: str = "auto"
) -> TorchRunner:
    config = RunnerConfig(
        str(FOLDER),
        block_size=4,
        kv_cache_bytes=4 << 20,
        max_model_len=512,
        num_threads=1,
        loads_tower=loads_tower,
        activation_dtype=activation_dtype,
    )
    return lifetime.enter_context(load_runner(config))


@pytest.fixture(scope="module")
def runner(lifetime: ExitStack) -> TorchRunner:
    return load(lifetime)


def an_engine(runner: TorchRunner, chunk: int) -> EngineCore:
    # Encodings of two pictures fit into memory.
    scheduling = SchedulerConfig(
        max_num_batched_tokens=chunk, max_num_seqs=4, encoder_cache_tokens=2 * PICTURE_TOKENS
    )
    return build_engine(runner, EngineOptions(scheduling))


@cache
def prompts() -> ImagePrompts:
    checkpoint = SafetensorsFolder(FOLDER)
    images_as = read_format(checkpoint)
    assert images_as is not None
    return ImagePrompts(checkpoint.load_tokenizer(), images_as)


def asked(*turns: Turn) -> EngineRequest:
    """Return a request for the answer to the last turn. Those before have answers in between."""
    marks = [("<image>" * len(numbers), text) for numbers, text in turns]
    text = "".join(f"<|user|>{mark}{text}<|assistant|>" for mark, text in marks)
    images = [draw(f"seen {number}", number).image for numbers, _ in turns for number in numbers]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    return prompts().add_to(
        EngineRequest(RequestId(repr(turns)), (), sampling, seed=0), text, images
    )


def text_of(token_ids: Sequence[int]) -> str:
    return SafetensorsFolder(FOLDER).load_tokenizer().decode(token_ids)


def answers(engine: EngineCore, *requests: EngineRequest) -> list[str]:
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
    return [text_of(token_ids) for token_ids in found.values()]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_same_text_about_other_pictures_has_other_answers(
    chunk: int, runner: TorchRunner
) -> None:
    engine = an_engine(runner, chunk)
    requests = [asked(((number,), QUESTION)) for number in NUMBERS]

    assert answers(engine, *requests) == list(NUMBERS)
    # One by one, with prefix hits of the text and of pictures that were seen before.
    for request, number in zip(requests, NUMBERS, strict=True):
        assert answers(engine, request) == [number]
    assert engine.scheduler.stats().total_prefix_hit_tokens >= len(NUMBERS) * PICTURE_TOKENS


@pytest.mark.parametrize("chunk", CHUNKS)
def test_each_of_two_pictures_in_a_prompt_is_read(chunk: int, runner: TorchRunner) -> None:
    engine = an_engine(runner, chunk)
    pairs = [(one, two) for one in NUMBERS for two in NUMBERS if one != two]
    requests = [asked((pair, question)) for pair in pairs for question in OF_TWO]

    found = answers(engine, *requests)

    assert found == [number for pair in pairs for number in pair]
    assert engine.scheduler.stats().total_prefix_hit_tokens


def test_a_picture_after_others_in_a_chat_is_read(runner: TorchRunner) -> None:
    engine = an_engine(runner, chunk=7)
    first = ((NUMBERS[0],), QUESTION)
    for number in NUMBERS[1:]:
        before = (first[0], f"{QUESTION}<|assistant|>{NUMBERS[0]}<|end|>")
        assert answers(engine, asked(before, ((number,), QUESTION))) == [number]


def test_rounded_activations_change_few_answers(runner: TorchRunner, lifetime: ExitStack) -> None:
    exact = load(lifetime, activation_dtype="bfloat16")
    numbers = [str(number) for number in range(100, 9999, 250)]
    requests = [asked(((number,), QUESTION)) for number in numbers]

    found = [answers(an_engine(each, 512), *requests) for each in (runner, exact)]

    right = [sum(map(str.__eq__, answered, numbers)) for answered in found]
    assert right[0] >= right[1] - 1


def test_a_decode_node_without_eyes_names_what_the_prefill_node_saw(
    runner: TorchRunner, lifetime: ExitStack
) -> None:
    blind = load(lifetime, loads_tower=False)

    with LocalHandoffs(runner, [blind], chunk=7) as nodes:
        for number in NUMBERS:
            request = asked(((NUMBERS[0], number), OF_TWO[1]))
            answer = nodes.answer(
                request.prompt_token_ids, 6, media=request.media, pictures=request.pictures
            )
            assert text_of(answer.token_ids[: len(number)]) == number
            assert answer.num_received
