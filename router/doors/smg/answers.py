"""Answers in the messages of SMG's VllmEngine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated.vllm_engine_pb2 import (
    GenerateComplete,
    GenerateResponse,
    GenerateStreamChunk,
)

from baton.core.output import Finish, TokenLogprobs
from baton.router.values import TokenChunk
from baton.rpc.errors import MessageTooLarge
from baton.rpc.messages.limits import MAX_MESSAGE_BYTES
from baton.rpc.status import TOO_LARGE, TOO_LARGE_ADVICE

POSITIONS_PER_SLICE = 256  # with logprobs, between which the event loop runs other requests
ABORTED = {"finish_reason": "abort"}


class AnswerMessages:
    """Builds the responses of one answer: chunks of a stream, and a last one, or only the last."""

    def __init__(self, index: int, prompt_token_ids: Sequence[int], *, is_streamed: bool) -> None:
        self._index = index
        self._prompt = prompt_token_ids
        self._is_streamed = is_streamed
        self._num_tokens = 0
        self._whole = GenerateComplete(index=index, prompt_tokens=len(prompt_token_ids))
        self.is_finished = False

    async def add(self, part: TokenChunk) -> GenerateResponse | None:
        """Add new tokens. Returns the chunk to send, if the answer is streamed."""
        self._num_tokens += len(part.token_ids)
        if not self._is_streamed:
            self._whole.output_ids.extend(part.token_ids)
            await self._fill(self._whole, part)
            return None
        chunk = GenerateStreamChunk(
            token_ids=part.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(part.token_ids),  # of this chunk
            index=self._index,
        )
        await self._fill(chunk, part)
        return GenerateResponse(chunk=chunk)

    def finish(self, finish: Finish | None) -> GenerateResponse:
        """Return the last response; None: of an aborted answer. Raises MessageTooLarge."""
        self.is_finished = True
        fields = ABORTED if finish is None else _fields_of(finish)
        complete = GenerateComplete(completion_tokens=self._num_tokens, **fields)
        complete.MergeFrom(self._whole)
        num_bytes = complete.ByteSize()
        if num_bytes > MAX_MESSAGE_BYTES:
            raise MessageTooLarge(
                f"{TOO_LARGE} ({num_bytes} vs. {MAX_MESSAGE_BYTES}); {TOO_LARGE_ADVICE}"
            )
        return GenerateResponse(complete=complete)

    async def _fill(
        self, message: GenerateComplete | GenerateStreamChunk, part: TokenChunk
    ) -> None:
        for entry in part.logprobs:
            _add(message.output_logprobs, entry)
            message.output_logprobs.token_logprobs.append(entry.logprob)
        filled = message.input_logprobs
        for place, known in enumerate(part.prompt_logprobs, len(filled.token_ids)):
            filled.token_logprobs.add(**({} if known is None else {"value": known.logprob}))
            _add(filled, known or TokenLogprobs(self._prompt[place], 0.0, 0))
            if place % POSITIONS_PER_SLICE == POSITIONS_PER_SLICE - 1:
                await asyncio.sleep(0)


def _fields_of(finish: Finish) -> dict[str, Any]:
    stop: dict[str, Any] = {}
    if finish.stop_string is not None:
        stop["matched_stop_str"] = finish.stop_string
    elif finish.stop_token_id is not None:
        stop["matched_token_id"] = finish.stop_token_id
    return {
        "finish_reason": finish.reason.value,
        "cached_tokens": finish.num_cached_prompt_tokens or 0,
        "spec_accepted_tokens": finish.served.tokens_accepted,
        "spec_draft_tokens": finish.served.tokens_proposed,
        **stop,
    }


def _add(message: Any, entry: TokenLogprobs) -> None:
    message.token_ids.append(entry.token_id)
    message.top_logprobs.add(
        token_ids=[token_id for token_id, _ in entry.top],
        values=[logprob for _, logprob in entry.top],
    )
