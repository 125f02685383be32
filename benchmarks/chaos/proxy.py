"""TCP proxy of a node that can block KV links of its peers but not the router."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from baton.v1 import kv_link_pb2

# Identifies connections of KV links: gRPC sends the method name in clear text.
LINK_MARK = kv_link_pb2.DESCRIPTOR.services_by_name["KvLinkService"].full_name.encode()
CHUNK_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class _Passage:
    """One proxied TCP connection."""

    inner: asyncio.StreamWriter
    outer: asyncio.StreamWriter
    is_link: bool = False

    def abort(self) -> None:
        for writer in (self.inner, self.outer):
            writer.transport.abort()


class NodeProxy:
    """Forwards connections to a node. KV links of decode nodes can be cut or stalled."""

    def __init__(self, inside: str) -> None:
        self._inside = inside  # host:port of the node
        self._passages: set[_Passage] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._is_flowing = asyncio.Event()
        self._is_flowing.set()
        self.address = ""

    async def open(self, host: str = "127.0.0.1") -> None:
        self._server = await asyncio.start_server(self._accept, host, 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        self._server.close()
        for passage in list(self._passages):
            passage.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_links(self) -> int:
        return sum(passage.is_link for passage in self._passages)

    def cut(self) -> None:
        """Abort all KV links, and new ones as soon as they begin."""
        self._is_cut = True
        for passage in list(self._passages):
            if passage.is_link:
                passage.abort()

    def stall(self) -> None:
        """Stall the traffic of KV links."""
        self._is_flowing.clear()

    def heal(self) -> None:
        self._is_cut = False
        self._is_flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
        host, _, port = self._inside.rpartition(":")
        try:
            inner_reader, inner = await asyncio.open_connection(host, int(port))
        except OSError:  # the node is not listening
            outer.transport.abort()
            return
        passage = _Passage(inner, outer)
        self._passages.add(passage)
        for source, target, is_inward in ((reader, inner, True), (inner_reader, outer, False)):
            task = asyncio.ensure_future(self._forward(passage, source, target, is_inward))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self,
        passage: _Passage,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        is_inward: bool,
    ) -> None:
        try:
            with suppress(OSError):
                while chunk := await source.read(CHUNK_BYTES):
                    if is_inward and LINK_MARK in chunk:
                        passage.is_link = True
                    if passage.is_link:
                        if self._is_cut:
                            break
                        await self._is_flowing.wait()
                    target.write(chunk)
                    await target.drain()
        finally:
            passage.abort()
            self._passages.discard(passage)
