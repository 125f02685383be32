"""Results of the in-process engine: completions with text and stop strings, and vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.checkpoint.tokenizer import Detokenizer
from baton.core.errors import EmbeddingFailed
from baton.core.output import Failure, FinishReason, Output, TokenLogprobs
from baton.core.request import EngineRequest
from baton.core.stop_strings import StopRule
from baton.core.vectors import Floats, decode_vector
from baton.router.answer import AnswerAssembler


@dataclass(slots=True)
class Completion:
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # by token, if requested
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: str | None = None  # with FinishReason.ERROR
    num_cached_tokens: int = 0
    warnings: list[str] = field(default_factory=list)  # such as max_tokens lowered


class CompletionBuilder:
    """Assembles a completion from the outputs of the engine, like an answer of the router."""

    def __init__(
        self,
        request: EngineRequest,
        detokenizer: Detokenizer,
        stop: StopRule,
        on_text: Callable[[str], object] | None = None,
    ) -> None:
        prompt = list(request.prompt_token_ids)
        has_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self.completion = Completion(prompt)
        self._answer = AnswerAssembler(detokenizer, stop, len(prompt) if has_prompt_logprobs else 0)
        self._on_text = on_text

    @property
    def has_ended(self) -> bool:
        return self.completion.finish_reason is not None

    def take_output(self, output: Output) -> bool:
        """Return whether `output` ended the completion. It must not be called after the end."""
        completion = self.completion
        self.take_usage(output)
        part = self._answer.take(output)
        if part is not None:
            completion.token_ids += part.token_ids
            completion.text += part.text
            completion.logprobs += part.logprobs
            completion.prompt_logprobs += part.prompt_logprobs
            if self._on_text is not None:
                self._on_text(part.text)
        finish = self._answer.finish
        if finish is not None:
            completion.finish_reason = finish.reason
            completion.stop_token_id = finish.stop_token_id
            completion.stop_string = finish.stop_string
        elif output.failure is not None:  # perhaps before the logprobs of the prompt
            completion.finish_reason = output.finish_reason
        if output.failure is not None:
            completion.error = output.failure.reason
        return self.has_ended

    def take_usage(self, output: Output) -> None:
        """Take the usage from the request's last output; after a stop string, that of its abort."""
        if output.served is not None:
            self.completion.num_cached_tokens = output.served.num_cached_tokens


class VectorBuilder:
    """Takes the vector of a text from the outputs of the engine."""

    def __init__(self) -> None:
        self.vector = b""
        self.failure: Failure | None = None
        self.has_ended = False

    def take_output(self, output: Output) -> bool:
        """Return whether `output` ended the request."""
        self.has_ended = output.finish_reason is not None
        self.vector, self.failure = output.vector, output.failure
        return self.has_ended

    def take_usage(self, output: Output) -> None:
        """Do nothing: a vector has no statistics."""

    def finish(self, index: int) -> Floats:
        """Return the vector of the text with this index. Raises EmbeddingFailed without one."""
        if self.failure is not None:
            raise EmbeddingFailed(f"text {index}: {self.failure.reason}")
        return decode_vector(self.vector)
