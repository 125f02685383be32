"""Control links for tests: within one process, and between two processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener

from baton.kv_transfer.link import LinkEvents, LinkId
from baton.kv_transfer.protocol.messages import LinkMessage


class LinkHub:
    """Connects the KV workers of one process. Messages arrive at once or when released."""

    def __init__(self, spy: Callable[[LinkMessage], None] | None = None) -> None:
        self._spy = spy  # sees each message as it is sent
        self._node_by_address: dict[str, HubLink] = {}
        self._numbers = itertools.count(1)
        self._ends: dict[LinkId, tuple[HubLink, LinkId]] = {}

    def link(self, address: str) -> HubLink:
        """Add a node that listens at this address."""
        node = HubLink(self)
        self._node_by_address[address] = node
        return node

    def remove(self, address: str) -> None:
        """Remove a node: its links break, and dialling it fails."""
        gone = self._node_by_address.pop(address)
        for link_id in gone.link_ids:
            self.cut(link_id)

    def move(self, address: str, new_address: str) -> None:
        """Break the links of a node, and let another one listen at its address."""
        node = self._node_by_address[new_address] = self._node_by_address.pop(address)
        for link_id in list(node.link_ids):
            self.cut(link_id)

    def cut(self, link_id: LinkId) -> None:
        """Break a link and report the loss to both nodes, unless they are removed."""
        end = self._ends.pop(link_id, None)
        if end is None:
            return
        there_node, there = end
        here_node, _ = self._ends.pop(there)
        for node, one in ((there_node, there), (here_node, link_id)):
            if node in self._node_by_address.values():
                node.lose(one, "the stream broke")

    @property
    def link_ids(self) -> list[LinkId]:
        return list(self._ends)

    def dial(self, node: HubLink, address: str) -> LinkId:
        here, there = LinkId(next(self._numbers)), LinkId(next(self._numbers))
        node.link_ids.add(here)
        peer = self._node_by_address.get(address)
        if peer is None:
            node.lose(here, f"nobody listens at {address}")
            return here
        peer.link_ids.add(there)
        self._ends[here] = (peer, there)
        self._ends[there] = (node, here)
        return here

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        end = self._ends.get(link_id)
        if end is not None:
            if self._spy is not None:
                self._spy(message)
            node, there = end
            node.deliver(there, message)

    def close(self, link_id: LinkId) -> None:
        end = self._ends.pop(link_id, None)
        if end is not None:
            node, there = end
            self._ends.pop(there, None)
            node.lose(there, "closed by the other side")


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message or a link loss in flight to a node."""

    link_id: LinkId
    content: LinkMessage | str


class HubLink:
    """Links of one node. `events` is set when its KV worker exists.

    While `is_held`, messages to this node wait in `queued` for the test to pass them on.
    """

    def __init__(self, hub: LinkHub) -> None:
        self._hub = hub
        self.events: LinkEvents
        self.link_ids: set[LinkId] = set()
        self.is_held = False
        self.queued: list[QueuedMessage] = []

    def pass_on(self, message: QueuedMessage) -> None:
        if isinstance(message.content, str):
            self.events.lost(message.link_id, message.content)
        else:
            self.events.deliver(message.link_id, message.content)

    def pass_all(self) -> None:
        queued, self.queued = self.queued, []
        for message in queued:
            self.pass_on(message)

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        self._take(QueuedMessage(link_id, message))

    def lose(self, link_id: LinkId, reason: str) -> None:
        self._take(QueuedMessage(link_id, reason))

    def _take(self, message: QueuedMessage) -> None:
        if self.is_held:
            self.queued.append(message)
        else:
            self.pass_on(message)

    def dial(self, address: str) -> LinkId:
        return self._hub.dial(self, address)

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        self._hub.send(link_id, message)

    def close(self, link_id: LinkId) -> None:
        self._hub.close(link_id)
        self.queued = [message for message in self.queued if message.link_id != link_id]


class SocketLink:
    """Links between processes over Unix sockets. It pickles, so it is for tests alone.

    A thread per link reads and delivers messages; `wake` is called after each.
    """

    def __init__(self, address: str | None, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._numbers = itertools.count(1)
        self._connections: dict[LinkId, Connection] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self.events: LinkEvents
        self._listener = Listener(address, family="AF_UNIX", backlog=64) if address else None
        if self._listener is not None:
            threading.Thread(target=self._accept, daemon=True).start()

    def dial(self, address: str) -> LinkId:
        link_id = self._next_id()
        try:
            connection = Client(address, family="AF_UNIX")
        except OSError as error:
            self.events.lost(link_id, repr(error))
            return link_id
        self._add(link_id, connection)
        return link_id

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        connection = self._connections.get(link_id)
        if connection is not None:
            try:
                with self._sending:
                    connection.send(message)
            except OSError:
                return  # its reader reports the loss

    def close(self, link_id: LinkId) -> None:
        connection = self._connections.pop(link_id, None)
        if connection is not None:
            connection.close()

    def _next_id(self) -> LinkId:
        with self._lock:
            return LinkId(next(self._numbers))

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            self._add(self._next_id(), connection)

    def _add(self, link_id: LinkId, connection: Connection) -> None:
        self._connections[link_id] = connection
        threading.Thread(target=self._read, args=(link_id, connection), daemon=True).start()

    def _read(self, link_id: LinkId, connection: Connection) -> None:
        while True:
            try:
                message: LinkMessage = connection.recv()
            # A connection that `close` takes away under a read ends in a TypeError.
            except (EOFError, OSError, TypeError) as error:
                if self._connections.pop(link_id, None) is not None:
                    self.events.lost(link_id, repr(error))
                    self._wake()
                return
            self.events.deliver(link_id, message)
            self._wake()
