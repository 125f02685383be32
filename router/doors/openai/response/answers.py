"""Response bodies and stream events that wrap the choices. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from baton.core.output import Finish
from baton.router.doors.openai.request.parsed_request import ParsedRequest
from baton.router.doors.openai.response.choices import (
    ChatChoice,
    CompletionChoice,
    EchoedPrompt,
    join_chunks,
)
from baton.router.doors.openai.response.logprobs import prompt_logprobs
from baton.router.http.json_encoding import Json, LazyArray, encode_in_slices, server_sent_event
from baton.router.input_processing.limits import MAX_POSITIONS_PER_SLICE
from baton.router.input_processing.tokenization import TextBoundary, placeholder_text
from baton.router.text_events.events import EventReader, TextEvent, fold
from baton.router.text_events.parsing import TextFormat, ToolCallMode
from baton.router.values import AnswerPart, TokenChunk

DONE = b"data: [DONE]\n\n"


def make_header(parsed: ParsedRequest, request_id: str, created: int, model: str) -> Json:
    """Return the fields that all messages of one answer share."""
    identity, kind = f"cmpl-{request_id}", "text_completion"
    if parsed.options.is_chat:
        identity = f"chatcmpl-{request_id}"
        kind = "chat.completion.chunk" if parsed.options.is_streamed else "chat.completion"
    return {"id": identity, "object": kind, "created": created, "model": model}


class UsageTotals:
    """Token usage. Each prompt counts once, regardless of the number of its answers."""

    def __init__(self, parsed: ParsedRequest) -> None:
        self._num_each = parsed.num_each
        self._with_answer = parsed.options.with_answer
        self._has_prediction = bool(parsed.calls[0].prediction)
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._num_proposed_tokens = 0  # by speculative decoding
        self._num_accepted_tokens = 0
        # Of the answer whose request computed the prompt: it has the fewest cached tokens.
        self._end_by_prompt: dict[int, Finish] = {}

    def add(self, index: int, end: Finish) -> None:
        if index % self._num_each == 0:
            self._num_prompt_tokens += end.num_prompt_tokens
        prompt = index // self._num_each
        known = self._end_by_prompt.setdefault(prompt, end)
        self._end_by_prompt[prompt] = min(known, end, key=_num_cached)
        if self._with_answer:
            self._num_completion_tokens += end.num_completion_tokens
            self._num_proposed_tokens += end.served.tokens_proposed
            self._num_accepted_tokens += end.served.tokens_accepted

    @property
    def totals(self) -> Json:
        usage = usage_of(self._num_prompt_tokens, self._num_completion_tokens)
        details = _prompt_details(list(self._end_by_prompt.values()))
        if details:
            usage["prompt_tokens_details"] = details
        if self._has_prediction:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._num_accepted_tokens,
                "rejected_prediction_tokens": self._num_proposed_tokens - self._num_accepted_tokens,
            }
        return usage


def _num_cached(end: Finish) -> int:
    """Return a sort key: an unknown number comes first, and makes the total unknown."""
    num_cached = end.num_cached_prompt_tokens
    return -1 if num_cached is None else num_cached


def _prompt_details(ends: Sequence[Finish]) -> Json:
    """Return the cached tokens, and by source those that were loaded from outside the KV cache."""
    num_cached = [each.num_cached_prompt_tokens for each in ends]
    known = [num for num in num_cached if num is not None]
    if len(known) < len(num_cached):
        return {}
    loaded: Counter[str] = Counter()
    for each in ends:
        loaded.update(each.served.prompt_tokens_loaded)
    return {"cached_tokens": sum(known), **({"loaded_tokens": dict(loaded)} if loaded else {})}


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> Json:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


class _Response:
    """Response to one request, whole or streamed."""

    def __init__(
        self,
        parsed: ParsedRequest,
        header: Json,
        prompts: Sequence[EchoedPrompt],
        text: TextBoundary,
    ) -> None:
        """`prompts` has one entry per call."""
        options = parsed.options
        token_text = placeholder_text if options.tokens_by_id else text.token
        self._parsed = parsed
        self._options = options
        self._header = header
        self._prompts = prompts
        self._token_text = token_text
        self._warnings = tool_warnings(options.text_format, supports_tools=text.supports_tools)
        self._events = EventReader(options.text_format.parser, len(prompts))
        self._usage = UsageTotals(parsed)
        self._choices: list[ChatChoice | CompletionChoice] = [
            ChatChoice(index, options, token_text)
            if options.is_chat
            else CompletionChoice(index, prompt, options, token_text)
            for index, prompt in enumerate(prompts)
        ]

    def _warnings_field(self, *ends: Finish) -> Json:
        """Return `warnings` about what was not or only partly done, or no field without any."""
        unfulfilled = (warning for end in ends for warning in end.warnings)
        warnings = [*self._warnings, *dict.fromkeys(unfulfilled)]
        return {"warnings": warnings} if warnings else {}


class WholeAnswer(_Response):
    """Collects the parts of all choices into one response body."""

    def __init__(
        self,
        parsed: ParsedRequest,
        header: Json,
        prompts: Sequence[EchoedPrompt],
        text: TextBoundary,
    ) -> None:
        super().__init__(parsed, header, prompts, text)
        self._texts: list[list[TextEvent]] = [[] for _ in prompts]
        self._chunks: list[list[TokenChunk]] = [[] for _ in prompts]
        self._ends: dict[int, Finish] = {}

    def add(self, index: int, part: AnswerPart) -> None:
        self._texts[index] += self._events.read(index, part)
        if isinstance(part, Finish):
            self._ends[index] = part
            self._usage.add(index, part)
        else:
            self._chunks[index].append(part)

    def body(self) -> Json:
        """Return the response, to be encoded in slices."""
        choices = (
            {**self._choice(index), "index": rank}
            for rank, index in enumerate(self._returned_indices())
        )
        return {
            **self._header,
            "choices": LazyArray(choices, has_long_items=True),
            "usage": self._usage.totals,
            **self._prompt_fields(),
            **self._warnings_field(*self._ends.values()),
        }

    def _choice(self, index: int) -> Json:
        tokens = join_chunks(self._chunks[index])
        return self._choices[index].whole(fold(self._texts[index]), tokens, self._ends[index])

    def _returned_indices(self) -> Iterator[int]:
        """Yield the likeliest answers to each prompt, best first; in order if all are returned."""
        parsed = self._parsed
        for first in range(0, len(self._choices), parsed.num_each):
            indices: Sequence[int] = range(first, first + parsed.num_each)
            if parsed.num_returned < parsed.num_each:
                indices = sorted(indices, key=self._likelihood, reverse=True)
            yield from indices[: parsed.num_returned]

    def _likelihood(self, index: int) -> float:
        """Return the mean logprob of the answer's tokens."""
        logprobs = [entry.logprob for chunk in self._chunks[index] for entry in chunk.logprobs]
        return statistics.fmean(logprobs) if logprobs else -math.inf

    def _prompt_fields(self) -> Json:
        """Return prompt logprobs of a chat. As in vLLM, completions have them in their choices."""
        num_top = self._options.num_prompt_logprobs
        if num_top is None or not self._options.is_chat:
            return {}
        entries = join_chunks(self._chunks[0]).prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(entries, num_top, self._token_text)}


class StreamedAnswer(_Response):
    """Converts the events of answers to those of a stream over HTTP."""

    async def chunk(self, index: int, part: AnswerPart) -> bytes:
        """Return the next chunk; empty if there is nothing to send yet."""
        choice, texts = self._choices[index], self._events.read(index, part)
        if isinstance(part, Finish):
            self._usage.add(index, part)
            last_chunk, warnings = choice.last_chunk(texts, part), self._warnings_field(part)
            return server_sent_event(
                self._chunk(index, last_chunk, part.num_completion_tokens, **warnings)
            )
        choice_json = choice.chunk(texts, part)
        if choice_json is None:
            return b""
        chunk = self._chunk(index, choice_json, part.first_index + len(part.token_ids))
        if len(part.logprobs) + len(part.prompt_logprobs) <= MAX_POSITIONS_PER_SLICE:
            return server_sent_event(chunk)
        choices = LazyArray(chunk["choices"], has_long_items=True)
        return b"".join(
            (b"data: ", *await encode_in_slices({**chunk, "choices": choices}), b"\n\n")
        )

    def end(self) -> bytes:
        if not self._options.with_usage:
            return DONE
        return (
            server_sent_event({**self._header, "choices": [], "usage": self._usage.totals}) + DONE
        )

    def _chunk(self, index: int, choice: Json, num_tokens: int, **more: Any) -> Json:
        if self._options.with_usage:
            more["usage"] = None
        if self._options.with_usage_so_far:
            more["usage"] = usage_of(len(self._prompts[index].token_ids), num_tokens)
        return {**self._header, "choices": [choice], **more}


def tool_warnings(text_format: TextFormat, *, supports_tools: bool) -> Sequence[str]:
    """Return what is not done of the request's tools."""
    if text_format.tool_calls is ToolCallMode.NONE:
        return ()
    warnings = []
    if not supports_tools:
        warnings.append("tools: this model's chat template does not show them to the model")
    if text_format.tool_calls is ToolCallMode.BY_MODEL:
        if text_format.is_constrained:
            warnings.append(
                "tools: structured output contains no calls unless tool_choice forces one"
            )
        elif not text_format.parsing.tools:
            warnings.append(
                "tools: no parser of this model's tool calls is known, so they stay in the "
                "content: set --tool-parser"
            )
    return warnings
