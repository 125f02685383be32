"""Completions of the in-process engine: tokens, text and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.checkpoint.tokenizer import Detokenizer
from baton.core.logprobs import TokenLogprobs
from baton.core.output import FinishReason, Output
from baton.core.stop_strings import StopRule, StopWatcher


@dataclass(slots=True)
class Completion:
    """Completion of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # by token, if requested
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None  # with FinishReason.ERROR
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    warnings: list[str] = field(default_factory=list)  # such as max_tokens lowered


class CompletionBuilder:
    """Assembles a completion from the engine's token outputs: detokenizes, applies stop strings."""

    def __init__(
        self, prompt_token_ids: Sequence[int], detokenizer: Detokenizer, stop: StopRule
    ) -> None:
        self.completion = Completion(list(prompt_token_ids))
        self._detokenizer = detokenizer
        self._stops = StopWatcher(stop)

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason is not None

    def take_output(self, output: Output) -> bool:
        """Return whether `output` ended the completion. It must not be called after the end."""
        completion = self.completion
        self.take_usage(output)
        completion.prompt_logprobs.extend(output.prompt_logprobs)
        num_taken = self._take_tokens(output.token_ids)
        completion.logprobs.extend(output.logprobs[:num_taken])
        if output.finish_reason is not None and self._stops.found is None:
            self._append_text(self._detokenizer.finish())
        if self._stops.found is not None:
            completion.finish_reason = FinishReason.STOP
            completion.stop_string = self._stops.found
        elif output.finish_reason is not None:
            self._finish(output)
        return self.has_ended

    def take_usage(self, output: Output) -> None:
        """Take the usage from the request's last output; after a stop string, that of its abort."""
        if output.served is not None:
            self.completion.num_cached_tokens = output.served.num_cached_tokens

    def _take_tokens(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            self.completion.token_ids.append(token_id)
            self._append_text(self._detokenizer.push(token_id))
            if self._stops.found is not None:
                return index + 1
        return len(token_ids)

    def _append_text(self, text: str) -> None:
        self.completion.text += self._stops.push(text, len(self.completion.token_ids))

    def _finish(self, output: Output) -> None:
        self.completion.text += self._stops.flush()
        self.completion.finish_reason = output.finish_reason
        self.completion.stop_token_id = output.stop_token_id
        if output.failure is not None:
            self.completion.error = output.failure.reason
