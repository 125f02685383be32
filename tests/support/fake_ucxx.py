"""Fake of the ucxx library. A test decides when messages arrive."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from baton.kv_transfer.protocol.memory_runs import BlockRun
from baton.kv_transfer.transports.staging import Slot


class FakeError(Exception):
    """Error of the fake library."""


@dataclass(slots=True)
class FakeRequest:
    completed: bool = False
    failure: str | None = None


@dataclass(slots=True)
class FakeTag:
    value: int


@dataclass(slots=True)
class FakeMessage:
    """Message sent by rendezvous: its bytes are read from P's memory when it lands."""

    sender_tag: FakeTag
    source: int
    length: int
    sent: FakeRequest
    received: FakeRequest | None = None
    target: int = 0

    def land(self) -> None:
        if self.received is None:
            raise ValueError("nobody has received this message yet")
        ctypes.memmove(self.target, self.source, self.length)
        self.sent.completed = self.received.completed = True


@dataclass(slots=True)
class FakeUcxx:
    error: type[Exception] = FakeError
    messages: list[FakeMessage] = field(default_factory=list)
    num_probed: int = 0

    def send(self, endpoint: Any, what: BlockRun | Slot, tag: int) -> FakeRequest:
        address, num_bytes = _run_of(what)
        self.messages.append(FakeMessage(FakeTag(tag), address, num_bytes, FakeRequest()))
        return self.messages[-1].sent

    def probe(self, worker: Any) -> FakeMessage | None:
        if self.num_probed == len(self.messages):
            return None
        self.num_probed += 1
        return self.messages[self.num_probed - 1]

    def receive(self, worker: Any, message: FakeMessage, into: BlockRun | Slot) -> FakeRequest:
        message.target, _ = _run_of(into)
        message.received = FakeRequest()
        return message.received

    def failure_of(self, request: FakeRequest) -> str | None:
        return request.failure

    def under_way(self) -> list[FakeMessage]:
        return [one for one in self.messages if one.received and not one.received.completed]


def _run_of(memory: BlockRun | Slot) -> tuple[int, int]:
    if isinstance(memory, BlockRun):
        return memory.address, memory.num_bytes
    return memory.ctypes.data, memory.nbytes
