"""Whole answers and the events of a stream, around the choices. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from router.openai.asking import Asked, Telling
from router.openai.chat_choices import ChatChoice
from router.openai.choices import (
    Choice,
    CompletionChoice,
    Json,
    ToldPrompt,
    joined,
)
from router.openai.encoding import MAX_POSITIONS_AT_ONCE, LongList, as_json, encoded
from router.openai.forced_calls import NamedCallReader, RequiredCallsReader
from router.openai.logprobs import Spell, prompt_logprobs
from router.openai.parsing import ALL_IS_CONTENT, FirstCallReader, Parsing, Reader
from router.openai.tool_choice import Calling
from router.openai.warnings import Warnings
from router.values import Ending, Piece

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
    """What every message of one answer says."""

    id: str
    object: str
    created: int
    model: str

    def over(self, choices: Sequence[Json] | LongList, **more: Any) -> Json:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def heading_of(asked: Asked, request_id: str, created: int, model: str) -> Heading:
    telling = asked.telling
    if not telling.is_chat:
        return Heading(f"cmpl-{request_id}", "text_completion", created, model)
    kind = "chat.completion.chunk" if telling.is_streamed else "chat.completion"
    return Heading(f"chatcmpl-{request_id}", kind, created, model)


def choices_of(
    asked: Asked,
    prompts: Sequence[ToldPrompt],
    spell: Spell,
    parsing: Parsing = ALL_IS_CONTENT,
) -> list[Choice]:
    """`prompts` has one for each call."""
    telling = asked.telling
    if telling.is_chat:
        return [
            ChatChoice(index, telling, spell, _reader(telling, parsing))
            for index in range(len(asked.calls))
        ]
    return [CompletionChoice(*each, telling, spell) for each in enumerate(prompts)]


def _reader(telling: Telling, parsing: Parsing) -> Reader:
    match telling.calling:
        case Calling.NAMED:
            return NamedCallReader(telling.function)
        case Calling.REQUIRED:
            return RequiredCallsReader()
    if telling.has_form:
        return ALL_IS_CONTENT.reader(with_tools=False)
    reader = parsing.reader(with_tools=telling.calling is Calling.BY_MODEL)
    return FirstCallReader(reader) if telling.with_one_call else reader


class Usage:
    """Each prompt counts once, however many answers it gets."""

    def __init__(self, asked: Asked) -> None:
        self._num_each = asked.num_each
        self._with_answer = asked.telling.with_answer
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._num_cached_by_prompt: dict[int, int | None] = {}

    def ended(self, index: int, ending: Ending) -> None:
        if index % self._num_each == 0:
            self._num_prompt_tokens += ending.num_prompt_tokens
        prompt, num_cached = index // self._num_each, ending.served.num_cached_prompt_tokens
        # The answer that had the prompt computed found the least of it in a cache.
        known = self._num_cached_by_prompt.setdefault(prompt, num_cached)
        if known is not None:
            self._num_cached_by_prompt[prompt] = num_cached and min(known, num_cached)
        if self._with_answer:
            self._num_completion_tokens += ending.num_completion_tokens

    @property
    def told(self) -> Json:
        usage = usage_of(self._num_prompt_tokens, self._num_completion_tokens)
        num_cached = [num for num in self._num_cached_by_prompt.values() if num is not None]
        if len(num_cached) == len(self._num_cached_by_prompt):
            usage["prompt_tokens_details"] = {"cached_tokens": sum(num_cached)}
        return usage


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> Json:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


class WholeAnswer:
    """Takes the parts of all choices as they come."""

    def __init__(
        self,
        asked: Asked,
        heading: Heading,
        choices: Sequence[Choice],
        spell: Spell,
        warnings: Warnings,
    ) -> None:
        self._asked = asked
        self._warnings = warnings
        self._telling = asked.telling
        self._heading = heading
        self._choices = choices
        self._spell = spell
        self._pieces: list[list[Piece]] = [[] for _ in choices]
        self._endings: dict[int, Ending] = {}
        self._usage = Usage(asked)

    def take(self, index: int, part: Piece | Ending) -> None:
        if isinstance(part, Ending):
            self._endings[index] = part
            self._usage.ended(index, part)
        else:
            self._pieces[index].append(part)

    def told(self) -> Json:
        """To be encoded in slices."""
        choices = (
            {
                **self._choices[index].whole(self._pieces[index], self._endings[index]),
                "index": place,
            }
            for place, index in enumerate(self._told_indices())
        )
        return self._heading.over(
            LongList(choices, has_long_items=True),
            usage=self._usage.told,
            **self._of_the_prompt(),
            **self._warnings.of(*self._endings.values()),
        )

    def _told_indices(self) -> Iterator[int]:
        """The likeliest answers to each prompt, best first; in order where all are told."""
        asked = self._asked
        for first in range(0, len(self._choices), asked.num_each):
            indices: Sequence[int] = range(first, first + asked.num_each)
            if asked.num_told < asked.num_each:
                indices = sorted(indices, key=self._likelihood, reverse=True)
            yield from indices[: asked.num_told]

    def _likelihood(self, index: int) -> float:
        """The mean logprob of its tokens."""
        logprobs = [entry.logprob for entry in joined(self._pieces[index]).logprobs]
        return statistics.fmean(logprobs) if logprobs else -math.inf

    def _of_the_prompt(self) -> Json:
        """vLLM tells it beside the choices of a chat, and in the choices of a completion."""
        num_top = self._telling.num_prompt_logprobs
        if num_top is None or not self._telling.is_chat:
            return {}
        entries = joined(self._pieces[0]).prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(entries, num_top, self._spell)}


class StreamedAnswer:
    """The same, as events."""

    def __init__(
        self,
        asked: Asked,
        heading: Heading,
        choices: Sequence[Choice],
        prompts: Sequence[ToldPrompt],
        warnings: Warnings,
    ) -> None:
        self._telling = asked.telling
        self._warnings = warnings
        self._heading = heading
        self._choices = choices
        self._prompts = prompts
        self._usage = Usage(asked)

    async def events(self, index: int, part: Piece | Ending) -> bytes:
        """Empty when there is nothing to tell yet."""
        choice = self._choices[index]
        if isinstance(part, Ending):
            self._usage.ended(index, part)
            warnings = self._warnings.of(part)
            chunk = choice.last_chunk(part)
            return event(self._told(index, chunk, part.num_completion_tokens, **warnings))
        told_choice = choice.chunk(part)
        if told_choice is None:
            return b""
        told = self._told(index, told_choice, part.first_index + len(part.token_ids))
        if len(part.logprobs) + len(part.prompt_logprobs) <= MAX_POSITIONS_AT_ONCE:
            return event(told)
        choices = LongList(told["choices"], has_long_items=True)
        return b"".join((b"data: ", *await encoded({**told, "choices": choices}), b"\n\n"))

    def end(self) -> bytes:
        if not self._telling.with_usage:
            return DONE
        return event(self._heading.over([], usage=self._usage.told)) + DONE

    def _told(self, index: int, choice: Json, num_tokens: int, **more: Any) -> Json:
        if self._telling.with_usage:
            more["usage"] = None
        if self._telling.with_usage_so_far:
            more["usage"] = usage_of(len(self._prompts[index].token_ids), num_tokens)
        return self._heading.over([choice], **more)


def event(told: Json) -> bytes:
    return b"data: " + as_json(told) + b"\n\n"
