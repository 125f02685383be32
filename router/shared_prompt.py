"""Several answers (`n`) to one prompt: the first has it computed, the others reuse its KV.

The decode node of the first answer keeps the prompt's blocks in its prefix cache, where all answers
share them. Each other answer computes only the last, partial block. Each answer remains a separate
request, which can fail, stop or migrate without the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from kv_transfer.types import TokenLogprobs
from router.dispatch.quarantine import PromptGroup
from router.routing.node_table import Node, Revision
from router.values import CompletionSummary, GenerateCall, TokenChunk, TokenPrompt


class SharedPrompt:
    """State shared by the answers to one prompt."""

    def __init__(self) -> None:
        self._has_first = False
        self._is_settled = asyncio.Event()
        self._decode: Node | None = None
        self._failure: Exception | None = None  # of the first answer
        self.token_ids: tuple[int, ...] | None = None  # None: not tokenised yet
        # Empty until the first answer has them, and if none are requested.
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.group = PromptGroup()
        self.revision: Revision | None = None  # of all answers, set by the first attempt

    @contextmanager
    def first_answer(self) -> Iterator[bool]:
        """Yield whether this answer is the first. When the first ends, the others stop waiting."""
        is_first_answer = not self._has_first
        self._has_first = True
        try:
            yield is_first_answer
        except Exception as failure:
            if is_first_answer:
                self._failure = failure
            raise
        finally:
            if is_first_answer:
                self._is_settled.set()

    def reuse(self, call: GenerateCall) -> GenerateCall:
        """Return the call without the work on its prompt that has been done for another answer."""
        if self.token_ids is not None:
            call = replace(call, prompt=TokenPrompt(self.token_ids))
        if self.prompt_logprobs:
            call = replace(call, sampling=replace(call.sampling, prompt_logprobs=None))
        return call

    async def with_prompt_logprobs(
        self, parts: AsyncGenerator[TokenChunk | CompletionSummary, None]
    ) -> AsyncGenerator[TokenChunk | CompletionSummary, None]:
        """Add the prompt logprobs, which are computed only once, to the first part of an answer."""
        is_first = True
        async with aclosing(parts):
            async for part in parts:
                if is_first and isinstance(part, TokenChunk):
                    is_first = False
                    self.prompt_logprobs = part.prompt_logprobs or self.prompt_logprobs
                    yield part._replace(prompt_logprobs=self.prompt_logprobs)
                else:
                    yield part

    def set_decode_node(self, decode: Node) -> None:
        """Record that all of the prompt's KV is on this node."""
        if not self._is_settled.is_set():
            self._decode = decode
            self._is_settled.set()

    async def decode_node(self) -> Node | None:
        """Wait for the decode node that has the prompt; None if the first answer ended before.

        Raises the error of the first answer if it failed: a request ends with the first failure.
        """
        await self._is_settled.wait()
        if self._failure is not None:
            raise self._failure
        return self._decode
