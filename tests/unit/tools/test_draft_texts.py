"""Texts for draft heads: excerpts as they are, and texts of the target, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from baton import Completion, SamplingParams
from baton.core.output import FinishReason
from tests.support.models import VARIANTS, make_model_folder
from tools.draft_texts import USER_TEMPERATURE, Library, Marks, Writer, Writing

WORD = 65  # a token that the model writes


class TalkativeModel:
    """A model whose messages are four words, cut off at `max_tokens`."""

    def __init__(self, end_id: int) -> None:
        self.message = [WORD, WORD + 1, WORD + 2, WORD + 3, end_id]
        self.sampling: list[list[SamplingParams]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[Completion]:
        self.sampling.append([*sampling])
        return [
            Completion([*prompt], self.message[: each.max_tokens], finish_reason=self._reason(each))
            for prompt, each in zip(prompts, sampling, strict=True)
        ]

    def _reason(self, sampling: SamplingParams) -> FinishReason:
        is_whole = sampling.max_tokens >= len(self.message)
        return FinishReason.STOP if is_whole else FinishReason.LENGTH


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model") / "llama"
    return AutoTokenizer.from_pretrained(make_model_folder(folder, VARIANTS["llama"]))


@pytest.fixture(scope="module")
def text_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained("models/demo")


def test_a_chat_goes_on_with_messages_of_both_sides(chat_tokenizer: Any) -> None:
    model = TalkativeModel(chat_tokenizer.eos_token_id)
    writer = Writer(model, chat_tokenizer)
    message, marks = model.message[:-1], writer.marks
    chat = [{"role": "user", "content": "@"}, {"role": "assistant", "content": "@"}]
    opening, before_answer, _ = chat_tokenizer.apply_chat_template(chat, tokenize=False).split("@")
    whole = [
        *(opening_ids := chat_tokenizer(opening, add_special_tokens=False).input_ids),
        *message,
        *chat_tokenizer(before_answer, add_special_tokens=False).input_ids,
        *message,
        *marks.before_user,
        *message,
    ]

    [text] = writer.texts([writer.begin(0.7)], len(whole) - 1, seed=5).tolist()

    assert marks.opening == opening_ids
    assert text == whole[:-1]
    assert [each.temperature for [each] in model.sampling] == [
        USER_TEMPERATURE,
        0.7,
        USER_TEMPERATURE,
    ]


def test_each_message_has_a_seed_of_its_own(chat_tokenizer: Any) -> None:
    model = TalkativeModel(chat_tokenizer.eos_token_id)
    writer = Writer(model, chat_tokenizer)

    writer.texts([writer.begin(1.0) for _ in range(3)], 60, seed=5)

    seeds = [each.seed for round_ in model.sampling for each in round_]
    assert len(seeds) > 3
    assert len({*seeds}) == len(seeds)


def test_a_text_that_is_no_chat_is_followed_by_another_one(text_tokenizer: Any) -> None:
    model = TalkativeModel(text_tokenizer.eos_token_id)
    writer = Writer(model, text_tokenizer)

    [text] = writer.texts([Writing([7, 8], 0.0)], 11, seed=5).tolist()

    assert text == [7, 8, *model.message, *writer.marks.opening, *model.message[:3]]
    assert {each.temperature for [each] in model.sampling} == {0.0}


def test_a_prompt_of_a_chat_is_a_whole_message(chat_tokenizer: Any) -> None:
    model = TalkativeModel(chat_tokenizer.eos_token_id)
    writer = Writer(model, chat_tokenizer)
    marks = writer.marks

    prompts = writer.prompts(2, 64, seed=5)

    assert prompts == [[*marks.opening, *model.message[:-1], *marks.before_answer]] * 2


def test_a_prompt_of_a_text_has_its_length(text_tokenizer: Any) -> None:
    writer = Writer(TalkativeModel(text_tokenizer.eos_token_id), text_tokenizer)

    assert [len(each) for each in writer.prompts(2, 9, seed=5)] == [9, 9]


def test_marks_of_a_model_without_chats_end_a_text_and_begin_one(text_tokenizer: Any) -> None:
    marks = Marks.of(text_tokenizer)

    assert not marks.is_chat
    assert marks.before_user == [text_tokenizer.eos_token_id, *marks.opening]


def test_excerpts_are_of_the_library_and_have_their_length(text_tokenizer: Any) -> None:
    library = Library(text_tokenizer, is_held_out=False)

    excerpts = library.excerpts(4, 30, seed=1)

    assert [len(each) for each in excerpts] == [30] * 4
    assert library.excerpts(4, 30, seed=1) == excerpts
    assert library.excerpts(4, 30, seed=2) != excerpts
