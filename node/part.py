"""Optional part of a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from baton.engine.events import KvEvent
from baton.engine.runner.loaded_runner import LoadedRunner
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.foreign_kv import ForeignReader
from baton.kv_transfer.pairs import Identity
from baton.node.options import NodeOptions
from baton.telemetry.metrics.instruments import Reading

TakeKvEvents = Callable[[Sequence[KvEvent]], None]  # must not block


@dataclass(frozen=True, slots=True)
class NodePart:
    running: AbstractContextManager[object]  # it works until the end of this block
    take_kv_events: TakeKvEvents | None = None
    driver: KvDriver | None = None
    foreign: ForeignReader | None = None
    read_gauges: Callable[[], Reading] = dict


# Makes the part unless the node is without it. The last argument wakes the engine, on any thread.
MakePart = Callable[[NodeOptions, Identity, LoadedRunner, Callable[[], None]], NodePart | None]
