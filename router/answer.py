"""Exactly-once assembly of an answer from the outputs of two nodes. Pure.

Both legs and all attempts number the answer's tokens in the same way. Each token is passed on once
and in order, no matter which leg delivers it first.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from baton.core.output import FinishReason, Output, TokenLogprobs
from baton.core.stop_strings import StopRule, StopWatcher
from baton.router.values import TokenChunk


class IncrementalDetokenizer(Protocol):
    """Incremental detokenizer that never returns an incomplete character."""

    def push(self, *token_ids: int) -> str: ...

    def finish(self) -> str: ...


class NoDetokenizer:
    """Detokenizer of a router without a tokenizer: returns no text."""

    def push(self, *token_ids: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class FinishStatus(NamedTuple):
    """Reason for the end of an answer."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


class AnswerAssembler:
    """Answer under assembly. Requested prompt logprobs are passed on before the first token."""

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer | None = None,
        stop: StopRule | None = None,
        num_prompt_logprobs: int = 0,
        prompt_end: str = "",
    ) -> None:
        """`prompt_end`, the last text of the prompt, is passed on with the first part."""
        self._detokenizer = detokenizer or NoDetokenizer()
        self._stops = StopWatcher(stop or StopRule())
        self._token_ids: list[int] = []
        self._early: dict[int, tuple[int, TokenLogprobs | None]] = {}
        self._end: tuple[int, FinishStatus] | None = None  # number of tokens at the end, and how
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._num_prompt_logprobs = num_prompt_logprobs
        self._has_passed_prompt = num_prompt_logprobs == 0
        self._prompt_end = prompt_end
        self.finish: FinishStatus | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    def begin_attempt(self) -> None:
        """Drop out-of-order outputs of the failed attempt: the next attempt sends them again."""
        self._early.clear()
        self._end = None

    def take(self, *outputs: Output) -> TokenChunk | None:
        """Add outputs of a leg and return the new part of the answer, if there is one."""
        if self.finish is not None:
            return None
        if len(outputs) == 1 and self._is_plain_next(outputs[0]):
            return self._take_next(outputs[0])
        for output in outputs:
            self._note(output)
        if len(self._prompt_logprobs) < self._num_prompt_logprobs:
            return None
        first_index = len(self._token_ids)
        text, logprobs = self._advance()
        token_ids = tuple(self._token_ids[first_index:])
        prompt_logprobs = self._pop_prompt_logprobs()
        vector = outputs[-1].vector
        if not (token_ids or text or prompt_logprobs or vector):
            return None
        prompt_end, self._prompt_end = self._prompt_end, ""
        return TokenChunk(
            first_index, token_ids, text, logprobs, prompt_logprobs, vector, prompt_end
        )

    def _is_plain_next(self, output: Output) -> bool:
        """True if the output is only the next token, as nearly all outputs are."""
        is_next = output.first_index == len(self._token_ids) and not self._early
        has_more = output.logprobs or output.prompt_logprobs or output.finish_reason
        has_passed_prompt = self._has_passed_prompt and not self._prompt_end
        is_in_order = is_next and has_passed_prompt and self._end is None
        return is_in_order and not has_more and len(output.token_ids) == 1

    def _take_next(self, output: Output) -> TokenChunk:
        """Add the next token: the fast path, taken for nearly every token."""
        (token_id,) = output.token_ids
        self._token_ids.append(token_id)
        text = self._stops.push(self._detokenizer.push(token_id), len(self._token_ids))
        return TokenChunk(output.first_index, output.token_ids, text + self._finish_if_due())

    def _note(self, output: Output) -> None:
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        entries = zip(output.token_ids, logprobs, strict=True)
        for place, entry in enumerate(entries, output.first_index):
            if place >= len(self._token_ids):
                self._early[place] = entry
        num_known = len(self._prompt_logprobs) - output.first_prompt_index
        if num_known >= 0:
            self._prompt_logprobs += output.prompt_logprobs[num_known:]
        if output.finish_reason not in (None, FinishReason.HANDED_OFF):
            num_tokens = output.first_index + len(output.token_ids)
            self._end = (num_tokens, FinishStatus(output.finish_reason, output.stop_token_id))

    def _advance(self) -> tuple[str, tuple[TokenLogprobs, ...]]:
        """Append the tokens that are next in order; return their text and logprobs."""
        text = ""
        logprobs: list[TokenLogprobs] = []
        while self._stops.found is None and len(self._token_ids) in self._early:
            token_id, logprob = self._early.pop(len(self._token_ids))
            self._token_ids.append(token_id)
            text += self._stops.push(self._detokenizer.push(token_id), len(self._token_ids))
            if logprob is not None:
                logprobs.append(logprob)
        return text + self._finish_if_due(), tuple(logprobs)

    def _finish_if_due(self) -> str:
        """Finish the answer if it ends here. Return the text that was held back."""
        num_tokens, finish = self._end or (None, None)
        is_due = len(self._token_ids) == num_tokens
        rest = ""
        if is_due and self._stops.found is None:
            rest = self._stops.push(self._detokenizer.finish(), len(self._token_ids))
        if self._stops.found is not None:
            self.finish = FinishStatus(FinishReason.STOP, stop_string=self._stops.found)
        elif is_due:
            self.finish = finish
            rest += self._stops.flush()
        return rest

    def _pop_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        if self._has_passed_prompt:
            return ()
        self._has_passed_prompt = True
        return tuple(self._prompt_logprobs)
