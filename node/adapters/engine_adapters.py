"""Adapters in the memory of the engine's runner."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Lock

from baton.checkpoint.peft_folder import PeftFolder
from baton.engine.engine_thread import EngineThread
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.model.adapters import Adapter
from baton.engine.scheduler.scheduler import Scheduler
from baton.node.adapters.loader import ReadAdapter
from baton.rpc.errors import AdapterUnreadable


class EngineAdapters:
    """Implements `AdapterMemory`.

    The engine takes actions and requests in order, so that an adapter is there before the requests
    that use it. It is removed after their ends, and after the last pass that contained them.
    """

    def __init__(self, table: AdapterTable, scheduler: Scheduler, engine: EngineThread) -> None:
        self._table = table
        self._scheduler = scheduler
        self._engine = engine
        self._preparing = Lock()  # files are read in parallel, and prepared one by one

    def digest(self, folder: Path) -> str:
        return PeftFolder(folder, self._table.limits).digest()

    def read(self, folder: Path, adapter_id: str) -> ReadAdapter:
        """Raises AdapterUnreadable if the files are those of another adapter."""
        files = PeftFolder(folder, self._table.limits)
        found = files.digest()
        if found != adapter_id:
            raise AdapterUnreadable(
                f"the files in {folder} have changed: they are the adapter {found}, not "
                f"{adapter_id}; load the adapter again"
            )
        with self._preparing:
            adapter = self._table.load(files)
        return ReadAdapter(adapter.num_bytes, partial(self._add, adapter_id, adapter))

    def remove(self, adapter_id: str) -> None:
        self._scheduler.adapters.discard(adapter_id)
        self._engine.post_after_passes(partial(self._table.remove, adapter_id))

    def _add(self, adapter_id: str, adapter: Adapter) -> None:
        self._scheduler.adapters.add(adapter_id)
        self._engine.post_after_passes(partial(self._table.add, adapter_id, adapter))
