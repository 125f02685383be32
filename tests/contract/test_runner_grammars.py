"""Grammar masks in the runner against a reference that tries every token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest
from baton.core.ids import RequestId
from baton.core.output import Failure, FailureCause
from baton.core.request import EngineRequest
from baton.core.sampling import ReasoningSection, SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.config import EngineOptions
from baton.engine.factory import build_engine
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.sampling.sampler import GRAMMAR_TOKENS_FORBIDDEN
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.spec_decode.config import Speculation
from baton.engine.structured_output.grammar import Bits, Grammar, Matcher
from baton.engine.structured_output.llguidance_backend import GrammarLibrary
from tests.support.models import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    prompt_of,
    reference_logprobs,
)
from tests.support.runner_drivers import Drive, Driver

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE, NUM_BLOCKS = 16, 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 2},
        "n": {"type": "integer", "minimum": -99, "maximum": 999},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True),
    "regex": StructuredOutputs(regex="[a-f]{3,9}(-[0-9é]{2}){2}"),
    "choice": StructuredOutputs(choice=("the quick", "the lazy dog", "東京")),
    "grammar": StructuredOutputs(grammar='root ::= "(" root ")" | [a-c]{1,4}'),
}
GREEDY = {"temperature": 0.0, "max_tokens": 64}


def config_of(folder: Path) -> RunnerConfig:
    block_bytes = 2 * 2 * 2 * 16 * BLOCK_SIZE * 4
    return RunnerConfig(str(folder), block_size=BLOCK_SIZE, kv_cache_bytes=NUM_BLOCKS * block_bytes)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[TorchRunner]:
    with load_runner(config_of(folder)) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def library(folder: Path) -> GrammarLibrary:
    return GrammarLibrary(SafetensorsFolder(folder), VOCAB_SIZE, (EOS_TOKEN_ID,))


@pytest.mark.parametrize("name", FORMS)
def test_greedy_sampling_takes_the_most_likely_token_allowed_by_the_grammar(
    name: str, folder: Path, runner: TorchRunner, library: GrammarLibrary
) -> None:
    requested = drive(library, FORMS[name], num_tokens=64)

    (answer,) = driver(runner).run(requested)

    assert answer[-1] == EOS_TOKEN_ID
    assert answer == _by_trying(folder, requested, answer)


@pytest.mark.parametrize("name", FORMS)
def test_a_constrained_answer_is_the_same_in_a_batch_in_chunks_and_after_preemption(
    name: str, runner: TorchRunner, library: GrammarLibrary
) -> None:
    alone = [
        driver(runner).run(drive(library, FORMS[name], seed=seed, temperature=1.0))[0]
        for seed in range(3)
    ]
    mixed = Driver(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, chunk=7)
    company = [drive(library, FORMS[name], seed=seed, temperature=1.0) for seed in range(3)]
    others = [replace(drive(library, None), request_id=RequestId(f"plain{i}")) for i in range(2)]
    for number, one in enumerate(company):
        one.request_id = RequestId(f"ruled{number}")
    for one in (*others, *company):
        mixed.add(one)
    for _ in range(6):
        mixed.step()
    mixed.preempt(company[1].request_id)
    while not all(one.is_done for one in (*others, *company)):
        mixed.step()
    mixed.flush()

    assert [one.outputs for one in company] == alone
    (plain,) = driver(runner).run(drive(library, None))
    assert [one.outputs for one in others] == [plain, plain]


def test_a_migrated_answer_continues_from_its_tokens(
    runner: TorchRunner, library: GrammarLibrary
) -> None:
    """Covers hand-offs, whose first token comes from the peer, and migrations."""
    (whole,) = driver(runner).run(drive(library, FORMS["json"]))
    for num_given in (1, 5, len(whole) - 1):
        rest = drive(library, FORMS["json"])
        rest.outputs = whole[:num_given]

        (answer,) = driver(runner).run(rest)

        assert answer == whole


def test_each_token_advances_the_matcher_once(runner: TorchRunner, library: GrammarLibrary) -> None:
    class Noted:
        """Grammar that records the tokens passed to its matcher."""

        def __init__(self, grammar: Grammar) -> None:
            self._matcher: Matcher = grammar.matcher()
            self.taken: list[int] = []

        def matcher(self) -> Matcher:
            return self

        def advance(self, token_ids: Sequence[int]) -> None:
            self.taken += token_ids
            self._matcher.advance(token_ids)

        def try_advance(self, token_id: int) -> bool:
            return self._matcher.try_advance(token_id)

        def rollback(self, num_tokens: int) -> None:
            self._matcher.rollback(num_tokens)

        def fill(self, allowed: Bits) -> None:
            self._matcher.fill(allowed)

    noted = Noted(library.compile(FORMS["regex"]))
    requested = replace(drive(library, None), grammar=noted)

    (answer,) = driver(runner).run(requested)

    assert answer[-1] == EOS_TOKEN_ID
    assert noted.taken == answer[:-1]


def test_logprobs_are_those_of_the_model_before_the_grammar_mask(
    folder: Path, runner: TorchRunner, library: GrammarLibrary
) -> None:
    requested = drive(library, FORMS["regex"], logprobs=3)

    driver(runner).run(requested)

    reference = reference_logprobs(folder, requested.tokens)[len(requested.prompt) - 1 :]
    ranks = [reported.rank for reported in requested.logprobs]
    assert max(ranks) > 1  # the allowed token differs from the likeliest one
    for reported, row in zip(requested.logprobs, reference, strict=False):
        assert reported.logprob == pytest.approx(float(row[reported.token_id]), abs=1e-3)
        assert reported.top[0][1] == pytest.approx(float(row.max()), abs=1e-3)


def test_before_min_tokens_an_answer_ends_only_if_the_grammar_allows_nothing_else(
    runner: TorchRunner, library: GrammarLibrary
) -> None:
    fixed = StructuredOutputs(regex="abc")
    open_ended = StructuredOutputs(regex="[a-z]+")

    (short,) = driver(runner).run(drive(library, fixed, min_tokens=30))
    (long,) = driver(runner).run(drive(library, open_ended, min_tokens=12, num_tokens=13))

    assert short[-1] == EOS_TOKEN_ID
    assert len(short) <= 4
    assert EOS_TOKEN_ID not in long[:12]


def test_a_constraint_in_conflict_with_other_settings_fails_with_their_names(
    runner: TorchRunner, library: GrammarLibrary
) -> None:
    requested = drive(library, FORMS["choice"], allowed_token_ids=(EOS_TOKEN_ID,))

    driver(runner).run(requested)

    assert requested.failure == Failure(GRAMMAR_TOKENS_FORBIDDEN, FailureCause.REQUEST)


def test_prior_tokens_outside_the_grammar_end_only_that_request(
    runner: TorchRunner, library: GrammarLibrary
) -> None:
    bad, good = drive(library, FORMS["regex"]), drive(library, FORMS["regex"])
    bad.outputs = [EOS_TOKEN_ID + 1, 3]
    good.request_id = RequestId("good")

    driver(runner).run(bad, good)

    assert bad.failure is not None
    assert bad.failure.cause is FailureCause.REQUEST
    assert good.failure is None
    assert good.outputs == driver(runner).run(drive(library, FORMS["regex"]))[0]


REPETITIVE = StructuredOutputs(regex="([ab]{2}-){9,12}c")
ITEMS = {"enum": ["aaa", "aab", "aaab"]}
UNIQUE = StructuredOutputs(
    json=json.dumps({"type": "array", "items": ITEMS, "uniqueItems": True, "minItems": 3}),
    disable_any_whitespace=True,
)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_drafts_change_no_structured_answer_also_after_reasoning(
    folder: Path, runner: TorchRunner, library: GrammarLibrary, async_scheduling: bool
) -> None:
    """Each drafted place is masked, and matchers return to the accepted tokens."""
    at_once = [
        SamplingParams(max_tokens=90, temperature=0.8, structured_outputs=form)
        for form in (REPETITIVE, UNIQUE)
    ]
    reasoning = ReasoningSection((50,))
    later = [replace(each, reasoning=reasoning, logit_bias={50: 6.0}) for each in at_once]
    requests = [
        EngineRequest(RequestId(str(number)), prompt_of(9) * 3, sampling, seed=number)
        for number, sampling in enumerate([*at_once, *later])
    ]
    config = replace(config_of(folder), speculation=Speculation(4, min_ngram=1, is_adaptive=False))

    plain, _ = _answers(runner, library, requests, async_scheduling=False)
    with load_runner(config) as drafting:
        drafted, num_accepted = _answers(
            drafting, library, requests, async_scheduling=async_scheduling
        )

    assert drafted == plain
    assert {answer[-1] for answer in plain.values()} == {EOS_TOKEN_ID}
    assert num_accepted > 0


def _answers(
    runner: TorchRunner,
    library: GrammarLibrary,
    requests: Sequence[EngineRequest],
    *,
    async_scheduling: bool,
) -> tuple[dict[str, list[int]], int]:
    scheduling = SchedulerConfig(max_num_seqs=4, async_scheduling=async_scheduling)
    engine = build_engine(runner, EngineOptions(scheduling, enable_prefix_caching=False))
    for request in requests:
        engine.scheduler.add(request)
        wanted = request.sampling.structured_outputs
        assert wanted is not None
        engine.scheduler.add_grammar(request, library.compile(wanted))
    found: dict[str, list[int]] = {}
    while engine.scheduler.has_work:
        for output in engine.step():
            assert output.failure is None
            found.setdefault(output.request_id, []).extend(output.token_ids)
    num_accepted = engine.scheduler.stats().total_accepted_tokens
    engine.close()
    engine.scheduler.check()
    return found, num_accepted


def drive(
    library: GrammarLibrary,
    form: StructuredOutputs | None,
    *,
    seed: int = 0,
    num_tokens: int = 64,
    **sampling: Any,
) -> Drive:
    return Drive(
        RequestId("r"),
        prompt_of(30),
        SamplingParams(**{**GREEDY, **sampling}),
        seed=seed,
        num_tokens=num_tokens,
        grammar=None if form is None else library.compile(form),
    )


def driver(runner: TorchRunner) -> Driver:
    return Driver(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, chunk=20)


def _by_trying(folder: Path, requested: Drive, answer: list[int]) -> list[int]:
    """Return the likeliest allowed token after each beginning of the answer, by transformers.

    It is the greedy answer if it equals the given one.
    """
    grammar = requested.grammar
    assert grammar is not None
    rows = reference_logprobs(folder, (*requested.prompt, *answer[:-1]))[-len(answer) :]
    return [
        next(t for t in row.argsort(descending=True).tolist() if _fits(grammar, [*answer[:i], t]))
        for i, row in enumerate(rows)
    ]


def _fits(grammar: Grammar, tokens: list[int]) -> bool:
    try:
        grammar.matcher().advance(tokens)
    except InvalidRequest:
        return False
    return True
