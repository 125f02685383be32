"""Speculative decoding: same tokens, logprobs and finish reasons as without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.core.ids import RequestId
from baton.core.output import FinishReason, Output, TokenLogprobs
from baton.core.request import EngineRequest
from baton.core.sampling import ReasoningSection, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.config import EngineOptions
from baton.engine.core import EngineCore
from baton.engine.factory import build_engine
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.spec_decode.config import Speculation
from baton.llm import LLM
from tests.support.families import RECURRENT
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, prompt_of

NUM_TOKENS = 40
NUM_DRAFTED = 5
# As many drafts as can be, whatever the time of passes is here.
SPECULATION = Speculation(NUM_DRAFTED, min_ngram=2, max_rows=64, is_adaptive=False)
SUFFIX = replace(SPECULATION, method="suffix")
FLOAT32 = [name for name, variant in VARIANTS.items() if variant.dtype == "float32"]
EVERY_REQUEST = ("llama", "mistral-window", "llama-rope-dynamic", "qwen3.5")
BFLOAT16 = [name for name, variant in VARIANTS.items() if variant.dtype == "bfloat16"]

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# Few allowed tokens: they repeat, so that some drafts are accepted and others are not.
SEEDED = replace(GREEDY, temperature=0.7, allowed_token_ids=(5, 6, 7, 8), logprobs=2)
REQUESTED = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "top-p": replace(SEEDED, top_p=0.9, min_p=0.01),
    "top-k": replace(SEEDED, top_k=3),
    "penalties": replace(
        SEEDED, repetition_penalty=1.05, presence_penalty=0.02, frequency_penalty=0.02
    ),
    "min-tokens": replace(SEEDED, stop_token_ids=(6, 7), min_tokens=30),
    "stop": replace(SEEDED, stop_token_ids=(8,)),
    "length": replace(SEEDED, max_tokens=23),
    "bad-words": replace(SEEDED, banned_sequences=((5, 6), (7, 7, 8), (6,))),
    "bias": replace(SEEDED, logit_bias={5: 2.0, 6: -1.0}),
}

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
# The first answer can only repeat one token; the second may repeat those of the prompt.
LOOPING = EngineRequest(RequestId("loop"), prompt_of(9), replace(GREEDY, allowed_token_ids=(5,)), 0)
EVEN = replace(SEEDED, temperature=50.0, allowed_token_ids=(5, 6))
LONELY = EngineRequest(RequestId("lonely"), prompt_of(9), replace(GREEDY, temperature=5.0), 0)
COPYING = EngineRequest(RequestId("copy"), (5, 6) * 16, EVEN, 0)

FolderOf = Callable[[str], Path]
MakeEngine = Callable[..., EngineCore]


@dataclass(slots=True)
class Got:
    """Outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    def take(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.outputs.append(output)

    @property
    def end(self) -> tuple[FinishReason | None, int | None]:
        return self.outputs[-1].finish_reason, self.outputs[-1].stop_token_id

    @property
    def num_accepted(self) -> int:
        served = self.outputs[-1].served
        assert served is not None
        assert 0 <= served.num_accepted_tokens <= served.num_proposed_tokens
        return served.num_accepted_tokens


@pytest.fixture(scope="module")
def block_bytes() -> dict[str, int]:
    """Return the bytes of a block by model, which `engine_of` fills in."""
    return {}


@pytest.fixture
def engine_of(
    model_folder: FolderOf, family_folder: FolderOf, block_bytes: dict[str, int]
) -> Iterator[MakeEngine]:
    """Yield a factory of engines, all of whose blocks must be free after the test."""
    made: list[EngineCore] = []
    with ExitStack() as runners:

        def make(
            name: str,
            speculation: Speculation | None,
            *,
            num_blocks: int = 200,
            max_num_batched_tokens: int = 64,
            max_num_seqs: int = 8,
            dtype: str = "auto",
        ) -> EngineCore:
            folder_of = family_folder if name in RECURRENT else model_folder
            config = RunnerConfig(
                str(folder_of(name)),
                dtype=dtype,
                kv_cache_bytes=1 << 20,
                max_num_seqs=max_num_seqs,
                speculation=speculation,
            )
            key = f"{name} {dtype}"
            if key not in block_bytes:
                with load_runner(config) as probe:
                    block_bytes[key] = probe.kv_memory.block_bytes
            config = replace(config, kv_cache_bytes=num_blocks * block_bytes[key])
            runner = runners.enter_context(load_runner(config))
            scheduling = SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
            )
            made.append(build_engine(runner, EngineOptions(scheduling)))
            return made[-1]

        yield make
        for engine in made:
            engine.scheduler.check()
            stats = engine.scheduler.stats()
            assert stats.num_free_blocks == stats.num_blocks


def run(engine: EngineCore, *requests: EngineRequest) -> list[Got]:
    for request in requests:
        engine.scheduler.add(request)
    got = {request.request_id: Got() for request in requests}
    while engine.scheduler.has_work:
        for output in engine.step():
            assert output.first_index == num_prior(requests, output) + len(
                got[output.request_id].token_ids
            )
            got[output.request_id].take(output)
    return list(got.values())


def num_prior(requests: Sequence[EngineRequest], output: Output) -> int:
    [request] = [one for one in requests if one.request_id == output.request_id]
    return len(request.prior_output_token_ids)


def specs_of(sampling: SamplingParams) -> list[EngineRequest]:
    """Return requests with repetitive prompts and others."""
    prompts = [prompt_of(9) * 3, prompt_of(40), prompt_of(5) * 7, prompt_of(1)]
    return [
        EngineRequest(RequestId(f"r{i}"), prompt, sampling, seed=i)
        for i, prompt in enumerate(prompts)
    ]


def assert_alike(plain: Sequence[Got], speculated: Sequence[Got]) -> None:
    for one, other in zip(plain, speculated, strict=True):
        assert other.token_ids == one.token_ids
        assert other.end == one.end
        assert [each.token_id for each in other.logprobs] == [e.token_id for e in one.logprobs]
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert theirs.logprob == pytest.approx(mine.logprob, abs=1e-4)


@pytest.mark.parametrize("name", EVERY_REQUEST)
def test_speculation_does_not_change_answers(name: str, engine_of: MakeEngine) -> None:
    requests = [
        replace(request, request_id=RequestId(f"{requested} {request.request_id}"))
        for requested, sampling in REQUESTED.items()
        for request in specs_of(sampling)
    ]
    num_rows = len(requests) * (1 + NUM_DRAFTED)
    limits = {"max_num_seqs": len(requests), "max_num_batched_tokens": num_rows, "num_blocks": 400}
    plain = run(engine_of(name, None, **limits), *requests)

    speculated = run(engine_of(name, replace(SPECULATION, max_rows=num_rows), **limits), *requests)

    assert_alike(plain, speculated)
    for requested in REQUESTED:
        own = zip(requests, speculated, strict=True)
        accepted = [got.num_accepted for one, got in own if one.request_id.startswith(requested)]
        is_repetitive = (name, requested) != ("qwen3.5", "greedy")
        assert (sum(accepted) > 0) is is_repetitive, requested
    assert sum(one.num_accepted for one in plain) == 0


@pytest.mark.parametrize("requested", REQUESTED)
def test_past_answers_do_not_change_answers(requested: str, engine_of: MakeEngine) -> None:
    requests = specs_of(REQUESTED[requested])
    engine = engine_of("llama", SUFFIX)

    first, again = run(engine, *requests), run(engine, *requests)

    assert_alike(run(engine_of("llama", None), *requests), first)
    assert_alike(first, again)
    num_steps = [sum(len(one.outputs) for one in got) for got in (first, again)]
    assert num_steps[1] < num_steps[0] / 1.5


@pytest.mark.parametrize("requested", ["greedy", "seeded", "penalties"])
@pytest.mark.parametrize("num_prior", [0, 20])
def test_predictions_do_not_change_answers(
    requested: str, num_prior: int, engine_of: MakeEngine
) -> None:
    """An answer without repetitions, and predictions of it with some tokens changed."""
    sampling = replace(REQUESTED[requested], allowed_token_ids=None, temperature=5.0)
    request = replace(LONELY, sampling=sampling)
    [plain] = run(engine_of("llama", None), request)
    answer = plain.token_ids
    predictions = {
        "right": answer,
        "changed": [*answer[:15], 9, *answer[16:25], 9, 9, *answer[25:]],
        "wrong": prompt_of(NUM_TOKENS),
    }
    engine, num_outputs = engine_of("llama", SPECULATION), {}
    for name, prediction in predictions.items():
        predicted = replace(
            request,
            predicted_token_ids=tuple(prediction),
            prior_output_token_ids=tuple(answer[:num_prior]),
        )
        [got] = run(engine, predicted)
        assert got.token_ids == answer[num_prior:]
        num_outputs[name] = len(got.outputs)

    assert num_outputs["right"] <= 2 + (NUM_TOKENS - num_prior) / (1 + NUM_DRAFTED)
    assert num_outputs["right"] < num_outputs["changed"] < num_outputs["wrong"]


def test_past_answers_are_drafts_for_the_same_salt_alone(engine_of: MakeEngine) -> None:
    engine, salted = engine_of("llama", SUFFIX), replace(LONELY, cache_salt="a")
    [first] = run(engine, salted)

    [other], [again] = run(engine, replace(salted, cache_salt="b")), run(engine, salted)

    assert first.token_ids == other.token_ids == again.token_ids
    assert len(other.outputs) == len(first.outputs)
    assert len(again.outputs) < len(first.outputs) / 2


# Those of EVERY_REQUEST are tested above.
@pytest.mark.parametrize("name", [n for n in (*FLOAT32, *RECURRENT) if n not in EVERY_REQUEST])
def test_greedy_tokens_stay_the_same_on_every_family(name: str, engine_of: MakeEngine) -> None:
    requests = specs_of(replace(GREEDY, max_tokens=24))

    speculated = run(engine_of(name, SPECULATION), *requests)

    assert_alike(run(engine_of(name, None), *requests), speculated)


@needs_kernels
@pytest.mark.parametrize("name", [*BFLOAT16, *RECURRENT])
def test_with_native_kernels_logprobs_are_bitwise_equal_with_speculation(
    name: str, engine_of: MakeEngine
) -> None:
    requests = specs_of(SEEDED)
    plain = run(engine_of(name, None, dtype="bfloat16"), *requests)

    speculated = run(engine_of(name, SPECULATION, dtype="bfloat16"), *requests)

    assert [one.logprobs for one in speculated] == [one.logprobs for one in plain]
    assert sum(one.num_accepted for one in speculated) > 0


def test_accepted_tokens_are_one_output(engine_of: MakeEngine) -> None:
    [got] = run(engine_of("llama", SPECULATION), LOOPING)

    lengths = [len(output.token_ids) for output in got.outputs]
    assert max(lengths) == 1 + NUM_DRAFTED
    assert len(got.outputs) < NUM_TOKENS / 2


def test_a_stop_token_among_accepted_tokens_ends_the_answer(engine_of: MakeEngine) -> None:
    speculating = engine_of("llama", SPECULATION)
    request, free, inside = next(
        (request, free, inside)
        for request in (replace(COPYING, request_id=RequestId(f"s{n}"), seed=n) for n in range(50))
        for free in run(speculating, request)
        if (inside := new_token_inside_a_run(free)) is not None
    )
    stopping = replace(request, sampling=replace(EVEN, stop_token_ids=(inside,)))

    [got] = run(speculating, stopping)

    assert got.token_ids == free.token_ids[: free.token_ids.index(inside) + 1]
    assert got.end == (FinishReason.STOP, inside)
    assert len(got.logprobs) == len(got.token_ids)
    same_output = free.outputs[len(got.outputs) - 1]
    assert len(got.outputs[-1].token_ids) < len(same_output.token_ids)


def new_token_inside_a_run(got: Got) -> int | None:
    """Return a token that first occurs inside of an output, before its last token."""
    for output in got.outputs:
        for place, token_id in enumerate(output.token_ids[:-1]):
            if token_id not in got.token_ids[: output.first_index + place]:
                return token_id
    return None


def test_preempted_and_batched_requests_get_the_same_tokens(engine_of: MakeEngine) -> None:
    requests = [
        EngineRequest(RequestId(f"r{i}"), prompt_of(3 + i) * 5, SEEDED, seed=i) for i in range(6)
    ]
    alone = [run(engine_of("llama", None), request)[0] for request in requests]
    crowded = engine_of("llama", SPECULATION, num_blocks=19)

    together = run(crowded, *requests)

    assert_alike(alone, together)
    assert crowded.scheduler.stats().total_preemptions > 0
    assert crowded.scheduler.stats().total_accepted_tokens > 0


def test_a_migrated_answer_continues_with_the_same_tokens(engine_of: MakeEngine) -> None:
    request = specs_of(SEEDED)[0]
    [whole] = run(engine_of("llama", None), request)
    resumed = replace(request, prior_output_token_ids=tuple(whole.token_ids[:20]))

    [rest] = run(engine_of("llama", SPECULATION), resumed)

    assert rest.token_ids == whole.token_ids[20:]
    assert rest.num_accepted > 0


def test_a_draft_stays_within_the_blocks_of_its_request(engine_of: MakeEngine) -> None:
    """A resumed request only has the blocks for its known tokens until its prompt is computed."""
    first = specs_of(SEEDED)[0]
    [alone] = run(engine_of("llama", None), first)
    # Its last chunk is one token, the last of a block, as the other one takes its share.
    chunk = 4 * 16 - 1
    engine = engine_of("llama", SPECULATION, max_num_batched_tokens=chunk + 1)
    resumed = replace(LOOPING, prior_output_token_ids=(5,) * (chunk + 1 - 9))
    resumed = replace(resumed, sampling=replace(LOOPING.sampling, max_tokens=70))
    engine.scheduler.add(first)
    got = Got()
    for output in step(engine) + step(engine):
        got.take(output)
    engine.scheduler.add(resumed)

    while engine.scheduler.has_work:
        for output in step(engine):
            if output.request_id == first.request_id:
                got.take(output)

    assert got.token_ids == alone.token_ids


def step(engine: EngineCore) -> list[Output]:
    return engine.step()


def test_rejected_drafts_are_never_cached_as_a_prefix(engine_of: MakeEngine) -> None:
    """Blocks of an answer are hit by a prompt that begins with it; they hold its KV alone."""
    engine = engine_of("llama", SPECULATION)
    request = specs_of(SEEDED)[0]
    [first] = run(engine, request)
    longer = replace(request, prompt_token_ids=(*request.prompt_token_ids, *first.token_ids))

    [after_hit] = run(engine, replace(longer, request_id=RequestId("hit")))

    [untouched] = run(engine_of("llama", None), longer)
    assert after_hit.token_ids == untouched.token_ids
    assert engine.scheduler.stats().total_prefix_hit_tokens >= NUM_TOKENS


@pytest.mark.parametrize("num_drafted", [NUM_DRAFTED, 32])
def test_the_longest_sequence_is_filled_to_its_end(num_drafted: int, engine_of: MakeEngine) -> None:
    """Lookahead slots are less than a block, or more than one."""
    name = "llama"  # 512 positions
    speculation = replace(SPECULATION, num_tokens=num_drafted)
    request = EngineRequest(
        RequestId("long"), prompt_of(9) * 52, replace(GREEDY, max_tokens=400), seed=1
    )

    [plain], [got] = run(engine_of(name, None), request), run(engine_of(name, speculation), request)

    assert got.token_ids == plain.token_ids
    assert got.end == (FinishReason.LENGTH, None)
    assert len(request.prompt_token_ids) + len(got.token_ids) == 512


def test_a_reused_request_id_starts_with_an_empty_ngram_index(engine_of: MakeEngine) -> None:
    engine = engine_of("llama", SPECULATION)
    [first] = run(engine, LOOPING)

    [again] = run(engine, LOOPING)

    assert again.num_accepted == first.num_accepted > 0


def test_nothing_is_proposed_without_free_rows(engine_of: MakeEngine) -> None:
    engine = engine_of("llama", replace(SPECULATION, max_rows=4))

    run(engine, *specs_of(GREEDY))

    assert engine.scheduler.stats().total_proposed_tokens == 0


def test_constrained_answers_take_drafts_and_stay_the_same(model_folder: FolderOf) -> None:
    forms = [
        StructuredOutputs(regex="[a-f]{3,9}(-[0-9]{2}){4}"),
        StructuredOutputs(regex="(the quick )+fox"),
        StructuredOutputs(json='{"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 9}'),
    ]
    constrained = [
        replace(GREEDY, ignore_eos=False, max_tokens=60, structured_outputs=form) for form in forms
    ]
    sampled = [replace(one, temperature=1.0, seed=seed) for seed, one in enumerate(constrained)]
    reasoning = ReasoningSection((40,))
    after = [
        replace(one, reasoning=replace(reasoning, begin_token_id=begin))
        for one in (constrained[0], sampled[1])
        for begin in (None, 41)
    ]
    requested = [*constrained, *sampled, *after, LOOPING.sampling]
    prompts = [[7, 8, 9] * 5] * len(requested)
    answers, accepted = [], []
    for speculative in ("", "ngram:4:fixed"):
        folder = str(model_folder("llama"))
        with LLM(folder, kv_cache_memory="4MiB", speculative=speculative) as llm:
            got = llm.generate(prompts, requested)
            answers.append([one.token_ids for one in got])
            before = llm.engine.scheduler.stats().total_accepted_tokens
            llm.generate(prompts[:3], constrained)  # alone: all drafts are of constrained rows
            accepted.append(llm.engine.scheduler.stats().total_accepted_tokens - before)

    assert answers[0] == answers[1]
    assert accepted[0] == 0 < accepted[1]
