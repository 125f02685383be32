"""Several answers to one prompt: the first has it computed and handed over, the others go there.

Its decode node keeps the prompt's blocks in its prefix cache, where all answers hold them
together; each of the others computes what the last, partial block has. Each answer remains a
request of its own: it may fail, stop and go on elsewhere without the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from router.nodes import Node, Revision
from router.quarantine import Kin


class SharedPrompt:
    def __init__(self) -> None:
        self._is_led = False
        self._is_told = asyncio.Event()
        self._decode: Node | None = None
        self.token_ids: tuple[int, ...] | None = None  # once one has them
        self.kin = Kin()
        self.revision: Revision | None = None  # of all answers, from the first try of any on

    @contextmanager
    def led(self) -> Iterator[bool]:
        """Whether this answer is the first. When the first ends, the others wait no longer."""
        leads = not self._is_led
        self._is_led = True
        try:
            yield leads
        finally:
            if leads:
                self._is_told.set()

    def is_at(self, decode: Node) -> None:
        """All of the prompt's KV is on this node."""
        if not self._is_told.is_set():
            self._decode = decode
            self._is_told.set()

    async def decode_node(self) -> Node | None:
        """The node that has it; None if the first answer came to nothing before it was anywhere."""
        await self._is_told.wait()
        return self._decode
