"""Fake of the memory in which adapters are computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS
from baton.core.errors import ModelError
from baton.node.adapters.loader import ReadAdapter
from baton.rpc.errors import AdapterUnreadable

PATIENCE_S = 30.0


@dataclass(slots=True)
class FakeMemory:
    """Fake of AdapterMemory. An id is the text in the file of weights, or the folder's name."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    num_reads: int = 0
    may_read: threading.Event = field(default_factory=threading.Event)
    broken: Collection[str] = ()  # ids of those that cannot be read
    on_add: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.may_read.set()

    @property
    def content(self) -> set[str]:
        return {each for each in self.added if self.added.count(each) > self.removed.count(each)}

    def digest(self, folder: Path) -> str:
        weights = folder / WEIGHTS
        return weights.read_text() if weights.exists() else folder.name

    def read(self, folder: Path, adapter_id: str) -> ReadAdapter:
        self.num_reads += 1
        if self.digest(folder) != adapter_id:
            raise AdapterUnreadable("changed")
        assert self.may_read.wait(PATIENCE_S)
        if adapter_id in self.broken:
            raise ModelError("broken")
        return ReadAdapter(10, partial(self._add, adapter_id))

    def remove(self, adapter_id: str) -> None:
        assert adapter_id in self.content
        self.removed.append(adapter_id)

    def _add(self, adapter_id: str) -> None:
        assert adapter_id not in self.content
        self.added.append(adapter_id)
        self.on_add()


def write_fake(folder: Path, adapter_id: str) -> Path:
    """Write a folder that FakeMemory reads as the adapter of this id."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_text(adapter_id)
    return folder
