"""Answers in the messages of SMG's service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2

from baton.core.logprobs import TokenLogprobs
from baton.core.output import FinishReason
from baton.rpc.errors import MessageTooLarge
from baton.rpc.messages.limits import MAX_MESSAGE_BYTES
from baton.rpc.status import TOO_LARGE, TOO_LARGE_ADVICE

POSITIONS_PER_SLICE = 256  # with logprobs, between which the event loop runs other requests


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """End of an answer."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None
    num_cached_tokens: int = 0
    num_accepted_tokens: int = 0  # of speculative decoding
    num_proposed_tokens: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        stop: dict[str, Any] = {}
        if self.stop_string is not None:
            stop["matched_stop_str"] = self.stop_string
        elif self.stop_token_id is not None:
            stop["matched_token_id"] = self.stop_token_id
        return {
            "finish_reason": self.reason.value,
            "cached_tokens": self.num_cached_tokens,
            "spec_accepted_tokens": self.num_accepted_tokens,
            "spec_draft_tokens": self.num_proposed_tokens,
            **stop,
        }


class AnswerMessages:
    """Builds the responses of one answer: chunks of a stream, and a last one, or only the last."""

    def __init__(self, index: int, prompt_token_ids: Sequence[int], *, is_streamed: bool) -> None:
        self._index = index
        self._prompt = prompt_token_ids
        self._is_streamed = is_streamed
        self._num_tokens = 0
        self._whole = vllm_engine_pb2.GenerateComplete(
            index=index, prompt_tokens=len(prompt_token_ids)
        )
        self.is_finished = False

    async def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs | None] = (),
    ) -> vllm_engine_pb2.GenerateResponse | None:
        """Add new tokens. Returns the chunk to send, if the answer is streamed."""
        self._num_tokens += len(token_ids)
        if not self._is_streamed:
            self._whole.output_ids.extend(token_ids)
            await self._fill(self._whole, logprobs, prompt_logprobs)
            return None
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(token_ids),
            index=self._index,
        )
        await self._fill(chunk, logprobs, prompt_logprobs)
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def finish(self, end: AnswerEnd) -> vllm_engine_pb2.GenerateResponse:
        """Return the last response. Raises MessageTooLarge."""
        self.is_finished = True
        complete = vllm_engine_pb2.GenerateComplete(
            completion_tokens=self._num_tokens, **end.fields
        )
        complete.MergeFrom(self._whole)
        num_bytes = complete.ByteSize()
        if num_bytes > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(
                f"{TOO_LARGE} ({num_bytes} vs. {MAX_MESSAGE_BYTES}); {TOO_LARGE_ADVICE}"
            )
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    async def _fill(
        self,
        message: Any,
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Sequence[TokenLogprobs | None],
    ) -> None:
        for entry in logprobs:
            _add(message.output_logprobs, entry)
            message.output_logprobs.token_logprobs.append(entry.logprob)
        filled = message.input_logprobs
        for place, known in enumerate(prompt_logprobs, len(filled.token_ids)):
            filled.token_logprobs.add(**({} if known is None else {"value": known.logprob}))
            _add(filled, known or TokenLogprobs(self._prompt[place], 0.0, 0))
            if place % POSITIONS_PER_SLICE == POSITIONS_PER_SLICE - 1:
                await asyncio.sleep(0)


def _add(message: Any, entry: TokenLogprobs) -> None:
    message.token_ids.append(entry.token_id)
    message.top_logprobs.add(
        token_ids=[token_id for token_id, _ in entry.top],
        values=[logprob for _, logprob in entry.top],
    )
