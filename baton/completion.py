"""One answer of the engine in this process, as it grows: tokens, text, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.stops import StopRule, StopWatcher
from baton.text import Detokenizer
from engine.request import FinishReason, Output
from kv_transfer.types import TokenLogprobs


@dataclass(slots=True)
class Completion:
    """What one prompt got."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # by token, when asked for
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None  # with FinishReason.ERROR
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


class Writer:
    """Writes a completion from the engine's outputs; the engine knows no text."""

    def __init__(
        self, prompt_token_ids: Sequence[int], detokenizer: Detokenizer, stop: StopRule
    ) -> None:
        self.completion = Completion(list(prompt_token_ids))
        self._detokenizer = detokenizer
        self._stops = StopWatcher(stop)

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason is not None

    def take(self, output: Output) -> bool:
        """Whether the answer ended with this. Nothing more may come after the end."""
        completion = self.completion
        self.take_account(output)
        completion.prompt_logprobs.extend(output.prompt_logprobs)
        num_taken = self._take_tokens(output.token_ids)
        completion.logprobs.extend(output.logprobs[:num_taken])
        if output.finish_reason is not None and self._stops.found is None:
            self._show(self._detokenizer.finish())
        if self._stops.found is not None:
            completion.finish_reason = FinishReason.STOP
            completion.stop_string = self._stops.found
        elif output.finish_reason is not None:
            self._end(output)
        return self.has_ended

    def take_account(self, output: Output) -> None:
        """The engine's account comes with its last output: that of an abort after a stop string."""
        if output.served is not None:
            self.completion.num_cached_tokens = output.served.num_cached_tokens

    def _take_tokens(self, token_ids: Sequence[int]) -> int:
        for place, token_id in enumerate(token_ids):
            self.completion.token_ids.append(token_id)
            self._show(self._detokenizer.push(token_id))
            if self._stops.found is not None:
                return place + 1
        return len(token_ids)

    def _show(self, text: str) -> None:
        self.completion.text += self._stops.push(text, len(self.completion.token_ids))

    def _end(self, output: Output) -> None:
        self.completion.text += self._stops.flush()
        self.completion.finish_reason = output.finish_reason
        self.completion.stop_token_id = output.stop_token_id
        self.completion.error = output.error
