"""Custom logits processors: discovery, application and isolation of failures."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from torch import Tensor

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.extra_args import Arguments
from baton.core.output import Failure
from baton.core.sampling import Argument, SamplingParams
from baton.engine.runner.model.pass_layout import Ints, TokenRun
from baton.engine.runner.sampling import logits_processors as processors
from baton.engine.runner.sampling.logits_processors import (
    NEVER,
    ModelView,
    Processors,
    load_processors,
    versions,
)
from baton.engine.runner.sampling.sampler import Sampler
from tests.support.token_runs import allow_only, make_run, sample

MODEL = ModelView("somewhere", 8)
EOS = (7,)


class Favour:
    """Processor that forces one token."""

    arguments = frozenset({"favour"})

    def __init__(self, model: ModelView) -> None:
        self._vocab_size = model.vocab_size

    def check(self, given: Arguments) -> None:
        if given["favour"] not in range(self._vocab_size):
            raise ValueError(f"favour is {given['favour']}; it must be a token id")

    def apply(self, scores: Tensor, tokens: Ints, num_prompt_tokens: int, given: Arguments) -> None:
        scores[int(str(given["favour"]))] = 1000.0


class Echo(Favour):
    """Processor that repeats the token a given distance back, and records its arguments."""

    arguments = frozenset({"back"})

    def check(self, given: Arguments) -> None: ...

    def apply(self, scores: Tensor, tokens: Ints, num_prompt_tokens: int, given: Arguments) -> None:
        outputs = tokens[num_prompt_tokens:]
        scores[int(outputs[-int(str(given["back"]))])] = 1000.0


class Broken(Favour):
    arguments = frozenset({"broken"})

    def check(self, given: Arguments) -> None: ...

    def apply(self, scores: Tensor, tokens: Ints, num_prompt_tokens: int, given: Arguments) -> None:
        if given["broken"] == "raises":
            raise RuntimeError("no such thing")
        scores[3] = float(str(given["broken"]))


def all_of_them() -> Processors:
    return Processors({"favour": Favour(MODEL), "echo": Echo(MODEL), "broken": Broken(MODEL)})


def row(*known: int, num_prompt: int = 1, **extra: Argument) -> TokenRun:
    sampling = SamplingParams(temperature=0.0, extra_args=extra)
    return make_run(known or (1,), sampling, num_prompt_tokens=num_prompt)


def chosen(*rows: TokenRun) -> list[int | str]:
    """Return token ids or errors; without a processor, token 5 is chosen."""
    logits = torch.zeros(len(rows), MODEL.vocab_size)
    logits[:, 5] = 1.0
    choices = sample(Sampler(EOS, all_of_them()), logits, rows).choices
    return [one.reason if isinstance(one, Failure) else one for one in choices]


def test_only_requests_with_its_argument_get_a_processor() -> None:
    assert chosen(row(favour=2), row(), row(favour=6)) == [2, 5, 6]


def test_a_processor_receives_the_tokens_so_far_and_the_prompt_length() -> None:
    assert chosen(row(1, 2, 3, 4, num_prompt=2, back=2)) == [3]


def test_processors_run_in_the_order_of_the_node_option() -> None:
    assert chosen(row(1, 3, num_prompt=1, favour=2, back=1)) == [2]  # equals: the lower id


def test_a_processor_cannot_allow_a_token_that_the_grammar_forbids() -> None:
    assert chosen(allow_only(row(favour=2), (3, 4), MODEL.vocab_size)) == [3]
    assert chosen(allow_only(row(favour=4), (3, 4), MODEL.vocab_size)) == [4]


@pytest.mark.parametrize(
    ("how", "word"), [("raises", "no such thing"), ("nan", "NaN"), ("inf", "+inf")]
)
def test_a_failing_processor_ends_only_its_request_with_a_named_error(how: str, word: str) -> None:
    failed, other = chosen(row(broken=how), row(favour=2))

    assert "broken" in str(failed)
    assert word in str(failed)
    assert other == 2


def test_a_processor_cannot_allow_a_banned_token() -> None:
    logits = torch.zeros(1, MODEL.vocab_size)
    banned = SamplingParams(temperature=0.0, banned_token_ids=(2,), extra_args={"favour": 2})
    requested = make_run([1], banned)

    (choice,) = sample(Sampler(EOS, all_of_them()), logits, [requested]).choices

    assert isinstance(choice, int)
    assert choice != 2
    assert float(logits.min()) > NEVER  # the caller's tensor is unchanged


def test_a_processor_cannot_extend_the_tokens_of_the_grammar() -> None:
    assert chosen(allow_only(row(favour=2), (4, 6), MODEL.vocab_size)) == [4]
    assert chosen(allow_only(row(favour=6), (4, 6), MODEL.vocab_size)) == [6]


@pytest.mark.parametrize(
    ("extra", "word"), [({"favour": 8}, "token id"), ({"favor": 2}, "takes 'favor'")]
)
def test_unknown_or_rejected_processor_arguments_are_an_invalid_request(
    extra: dict[str, Argument], word: str
) -> None:
    with pytest.raises(InvalidRequest, match=word) as refused:
        all_of_them().check(extra)

    assert refused.value.field == "extra_args"


def test_two_processors_with_the_same_argument_are_refused_at_start() -> None:
    with pytest.raises(InvalidConfig, match="both take 'favour'"):
        Processors({"one": Favour(MODEL), "other": Favour(MODEL)})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoints(
        EntryPoint(name, f"{__name__}:{value}", processors.GROUP)
        for name, value in {"favour": "Favour", "echo": "Echo", "bad": "nothing"}.items()
    )
    monkeypatch.setattr(processors, "entry_points", lambda group: found.select(group=group))


@pytest.mark.usefixtures("installed")
def test_processors_are_found_by_entry_point_and_created_for_the_model() -> None:
    found = load_processors(["echo", "favour"], MODEL)

    found.check({"favour": MODEL.vocab_size - 1, "back": 1})
    with pytest.raises(InvalidRequest):
        found.check({"favour": MODEL.vocab_size})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "word"), [("absent", "installed: bad, echo"), ("bad", "nothing")])
def test_a_missing_or_failing_processor_is_named(name: str, word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        load_processors([name], MODEL)


@pytest.mark.usefixtures("installed")
def test_different_processors_have_different_versions() -> None:
    assert versions(["echo"]) != versions(["echo", "favour"]) != versions(["favour", "echo"])
    assert versions([]) == []
