"""Texts for the training of a draft head: excerpts of the library, and texts of the target.

The target writes on Baton's engine. If it has a chat template, it writes chats, also the messages
of their users.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from baton import LLM, Completion, SamplingParams
from baton.core.output import FinishReason
from tools.train_demo_model import read_corpus

CHARACTERS_PER_TOKEN = 6  # that are enough for an excerpt
CONTENT = "@CONTENT@"
USER_TEMPERATURE = 0.9
# KV of the texts that are written at once. With too little, some wait for others.
KV_MEMORY = "1GiB"


class Library:
    """The Python standard library, or its files that training does not see."""

    def __init__(self, tokenizer: Any, *, is_held_out: bool) -> None:
        corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
        self._tokenizer = tokenizer
        self._text = "".join((corpus.held_out if is_held_out else corpus.train).values())

    def excerpts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return random excerpts of `length` tokens from starts of lines on."""
        random, found = Random(seed), list[list[int]]()
        num_characters = CHARACTERS_PER_TOKEN * length
        while len(found) < count:
            start = self._text.index("\n", random.randrange(len(self._text) - 2 * num_characters))
            excerpt = self._text[start + 1 : start + 1 + num_characters]
            token_ids = self._tokenizer(excerpt, verbose=False).input_ids[:length]
            if len(token_ids) == length:
                found.append(token_ids)
        return found


@dataclass(frozen=True, slots=True)
class Marks:
    """Tokens between the messages of a chat. Without a chat template, a text is one message."""

    opening: list[int]  # before the first message
    before_answer: list[int]
    before_user: list[int]
    is_chat: bool

    @classmethod
    def of(cls, tokenizer: Any) -> Marks:
        if tokenizer.chat_template:
            chat = [{"role": role, "content": CONTENT} for role in ("user", "assistant", "user")]
            pieces = tokenizer.apply_chat_template(chat, tokenize=False).split(CONTENT)[:3]
            opening, *others = (
                list(tokenizer(each, add_special_tokens=False).input_ids) for each in pieces
            )
            if all(others):
                return cls(opening, others[0], others[1], is_chat=True)
        else:
            opening = list(tokenizer("").input_ids or [tokenizer.bos_token_id])
        return cls(opening, [], [tokenizer.eos_token_id, *opening], is_chat=False)


@dataclass(slots=True)
class Writing:
    """A text that the target writes, and the kind of message that it writes now."""

    token_ids: list[int]
    temperature: float  # of answers
    is_user: bool = False


class TextModel(Protocol):
    """The part of `LLM` that writes."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[Completion]: ...


class Writer:
    """Writes texts with the target, each up to its length or up to the end of a message."""

    def __init__(self, model: TextModel, tokenizer: Any) -> None:
        self._model, self._end_id = model, tokenizer.eos_token_id
        self.marks = Marks.of(tokenizer)

    @classmethod
    @contextmanager
    def open(cls, target: Path, tokenizer: Any, num_threads: int) -> Iterator[Writer]:
        """Load the target in Baton."""
        with LLM(
            str(target), dtype="bfloat16", kv_cache_memory=KV_MEMORY, num_threads=num_threads
        ) as llm:
            yield cls(llm, tokenizer)

    def texts(self, beginnings: Sequence[Writing], length: int, seed: int) -> Tensor:
        """Continue texts to `length` tokens, message by message, [texts, length]."""
        unfinished = list(beginnings)
        while unfinished:
            unfinished = self.messages(unfinished, length, seed)
            for each in unfinished:
                self._begin_message(each)
            unfinished = [each for each in unfinished if len(each.token_ids) < length]
            seed += len(beginnings)
        return torch.tensor([each.token_ids[:length] for each in beginnings], dtype=torch.int64)

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        """Return beginnings of texts: `length` tokens, or a user's message, if it is a chat."""
        found = list[list[int]]()
        while len(found) < count:
            begun = [self.begin(1.0) for _ in range(count - len(found))]
            seed += len(begun)
            if not self.marks.is_chat:
                return self.texts(begun, length, seed).tolist()
            for each in self.messages(begun, length, seed):
                self._begin_message(each)
                found.append(each.token_ids)
        return found

    def begin(self, temperature: float) -> Writing:
        """Return the beginning of a text that the target writes by itself."""
        return Writing([*self.marks.opening], temperature, is_user=self.marks.is_chat)

    def messages(self, texts: Sequence[Writing], length: int, seed: int) -> list[Writing]:
        """Continue texts by a message each, to `length`, and return those whose message ended."""
        sampling = [
            SamplingParams(
                temperature=USER_TEMPERATURE if each.is_user else each.temperature,
                seed=seed + place,
                max_tokens=length - len(each.token_ids),
            )
            for place, each in enumerate(texts)
        ]
        written = self._model.generate([each.token_ids for each in texts], sampling)
        for each, completion in zip(texts, written, strict=True):
            each.token_ids += completion.token_ids
        return [
            each
            for each, completion in zip(texts, written, strict=True)
            if completion.finish_reason is FinishReason.STOP
        ]

    def _begin_message(self, text: Writing) -> None:
        if text.token_ids[-1] == self._end_id:
            text.token_ids.pop()  # the marks have it
        text.token_ids += self.marks.before_answer if text.is_user else self.marks.before_user
        text.is_user = self.marks.is_chat and not text.is_user
