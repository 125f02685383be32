"""Several answers to one prompt: the first has it computed and handed over, the others go there.

Its decode node keeps the prompt's blocks in its prefix cache, where all answers hold them
together; each of the others computes what the last, partial block has. Each answer remains a
request of its own: it may fail, stop and go on elsewhere without the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from kv_transfer.types import TokenLogprobs
from router.nodes import Node, Revision
from router.quarantine import Kin
from router.values import Ending, Piece


class SharedPrompt:
    def __init__(self, num_answers: int = 1) -> None:
        self.num_answers = num_answers
        self._is_led = False
        self._is_told = asyncio.Event()
        self._decode: Node | None = None
        self._failure: Exception | None = None  # of the first answer
        self.token_ids: tuple[int, ...] | None = None  # once one has them
        # Empty until the first answer has them, and where none are asked for.
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.kin = Kin()
        self.revision: Revision | None = None  # of all answers, from the first try of any on

    @contextmanager
    def led(self) -> Iterator[bool]:
        """Whether this answer is the first. When the first ends, the others wait no longer."""
        leads = not self._is_led
        self._is_led = True
        try:
            yield leads
        except Exception as failure:
            if leads:
                self._failure = failure
            raise
        finally:
            if leads:
                self._is_told.set()

    async def with_prompt_logprobs(
        self, parts: AsyncGenerator[Piece | Ending, None]
    ) -> AsyncGenerator[Piece | Ending, None]:
        """One answer's parts; the first has the prompt's logprobs, which are computed only once."""
        is_first = True
        async with aclosing(parts):
            async for part in parts:
                if is_first and isinstance(part, Piece):
                    is_first = False
                    self.prompt_logprobs = part.prompt_logprobs or self.prompt_logprobs
                    yield part._replace(prompt_logprobs=self.prompt_logprobs)
                else:
                    yield part

    def is_at(self, decode: Node) -> None:
        """All of the prompt's KV is on this node."""
        if not self._is_told.is_set():
            self._decode = decode
            self._is_told.set()

    async def decode_node(self) -> Node | None:
        """The node that has it; None if the first answer ended before it was anywhere.

        Raises what the first answer failed with: a request ends with the first failure.
        """
        await self._is_told.wait()
        if self._failure is not None:
            raise self._failure
        return self._decode
