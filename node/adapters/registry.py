"""Adapters of a node by name, and those that requests use."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from baton.core.errors import InvalidConfig, InvalidRequest, ModelError
from baton.core.ids import AdapterRef
from baton.node.adapters.config import AdapterFolder, check_id, check_name
from baton.node.adapters.counts import AdapterCounts
from baton.node.adapters.folders import check_path, folder_below, path_below
from baton.node.adapters.generations import NameGenerations
from baton.node.adapters.loader import AdapterLoader
from baton.rpc.errors import AdapterExists, AdapterUnreadable, TooManyAdapters, UnknownAdapter
from baton.rpc.node_info import LoadedAdapter, NodeAdapters

log = logging.getLogger(__name__)

# A report of all of them keeps the asyncio thread busy for about 20 ms.
MAX_NAMES = 2_000


class AdapterRegistry:
    """Names of adapters, and where their files are. Only the asyncio thread uses it."""

    def __init__(
        self,
        loader: AdapterLoader[Any],
        root: Path | None,
        model: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        max_names: int = MAX_NAMES,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`root` is the folder of those that are loaded while the node runs."""
        self.loader = loader
        self.version = 0  # grows with each change of what `report` returns, except of the requests
        self._root = root
        self._model = model
        self._on_change = on_change
        loader.on_change = self.note_change
        self._max_names = max_names
        self._clock_ns = clock_ns
        self._generations = NameGenerations()
        self._by_name: dict[str, AdapterRef] = {}
        self._num_names: Counter[str] = Counter()  # by id
        self._folder_by_id: dict[str, Path] = {}  # of those that were named at the start
        self._unnamed: dict[str, AdapterRef] = {}  # in memory for requests of routers

    def read_at_start(self, adapters: Sequence[AdapterFolder]) -> None:
        """Read and name adapters before there are requests. Raises ModelError, InvalidConfig."""
        for name, folder in adapters:
            if name == self._model:
                raise InvalidConfig(f"--lora {name}: this is the name of the model")
            adapter_id = self.loader.read_at_start(folder)
            self._folder_by_id[adapter_id] = folder
            # An operator's order, which has a generation, is later than any start.
            self._set_name(AdapterRef(name, adapter_id, path_below(self._root, folder)), 0)

    async def load(
        self,
        name: str,
        path: str,
        *,
        can_replace: bool = False,
        adapter_id: str = "",
        generation: int | None = None,
    ) -> AdapterRef:
        """Read an adapter below the root, and name it.

        The folder of one that is in memory is not read if `adapter_id` is given. An adapter that is
        replaced stays in memory until its place is needed: requests on their way to this node use
        it, and it gets its name back if another node cannot replace it.

        `generation` orders this among the loads and unloads of the name; by default it is the last.

        Raises InvalidRequest for what cannot be served, AdapterExists, OutdatedOrder,
        TooManyAdapters, and what `AdapterLoader.held` raises.
        """
        self._check_name(name)
        generation = self._generations.number(name, generation, self._clock_ns())
        try:
            adapter = await self._identify(name, path, adapter_id)
            self._check_is_free(adapter, can_replace, generation)
            folder = partial(self._folder_of, adapter)
            async with self._keeping_replaced(adapter), self.loader.held(adapter.id, folder):
                # Others may have taken it meanwhile.
                self._check_is_free(adapter, can_replace, generation)
                self._set_name(adapter, generation)
        except ModelError as error:
            raise InvalidRequest(str(error), "path") from error
        return adapter

    async def _identify(self, name: str, path: str, adapter_id: str) -> AdapterRef:
        """Return the adapter in a folder. With an id, its folder is not read yet."""
        check_id(adapter_id)
        if not adapter_id:
            adapter_id = await self.loader.digest(partial(folder_below, self._root, path))
        elif path:  # else of an adapter that was given at the start, in another folder
            check_path(path)
        return AdapterRef(name, adapter_id, PurePosixPath(path).as_posix() if path else "")

    @asynccontextmanager
    async def _keeping_replaced(self, adapter: AdapterRef) -> AsyncGenerator[None]:
        """Keep the adapter that has the name from being evicted for the new one.

        Its files may be those of the new one already. With one place it cannot be kept.
        """
        old = self._by_name.get(adapter.name)
        if old is None or old.id == adapter.id or not self.loader.keeps_beside_loads(old.id):
            yield
            return
        async with self.loader.held(old.id, partial(self._folder_of, old)):
            yield

    def unload(self, name: str, generation: int | None = None) -> None:
        """Forget a name. Requests in progress keep the adapter.

        Loads of a lower `generation` are refused from now on, also if the name is not known. Raises
        InvalidRequest, OutdatedOrder and UnknownAdapter.
        """
        check_name(name)
        generation = self._generations.number(name, generation, self._clock_ns())
        self._generations.check(name, generation)
        self._generations.note_unload(name, generation)
        self.note_change()
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            raise UnknownAdapter(f"this node has no adapter {name!r}")
        log.info("unloaded adapter %r (%s)", name, adapter.id)
        if self._drop_name_of(adapter.id):
            self._folder_by_id.pop(adapter.id, None)
            self.loader.forget(adapter.id)

    @asynccontextmanager
    async def held(self, adapter: AdapterRef) -> AsyncGenerator[None]:
        """Keep the adapter of a request in memory until the block ends.

        Raises AdaptersBusy, UnknownAdapter, and AdapterUnreadable if its files have changed.
        """
        if not adapter.id:
            yield
            return
        async with self._read(adapter):
            yield

    @asynccontextmanager
    async def _read(self, adapter: AdapterRef) -> AsyncGenerator[None]:
        is_entered = False
        try:
            async with self.loader.held(adapter.id, partial(self._folder_of, adapter)):
                is_entered = True
                self._note_unnamed(adapter)
                yield
        except ModelError as error:
            if is_entered:
                raise
            raise AdapterUnreadable(f"adapter {adapter.name!r}: {error}") from error

    def report(self) -> NodeAdapters:
        """Return all adapters with a name, and those in memory without one."""
        resident = self.loader.resident
        self._unnamed = {
            adapter_id: adapter
            for adapter_id, adapter in self._unnamed.items()
            if adapter_id in resident
        }
        adapters = (*self._by_name.values(), *self._unnamed.values())
        listed = tuple(map(self._describe, sorted(adapters, key=_by_name_and_id)))
        return NodeAdapters(listed, self._generations.unloaded)

    def counts(self) -> AdapterCounts:
        """Return the current counts. For any thread."""
        loader = self.loader
        return AdapterCounts(
            len(self._by_name),
            len(loader.resident),
            loader.resident.num_in_use,
            loader.resident.num_reserved,
            loader.resident.num_bytes,
            loader.num_waiting(for_place=True),
            loader.num_waiting(for_place=False),
            loader.total_failed,
            loader.total_evicted,
        )

    def names_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the adapters that requests use, and those they wait for. For any thread."""
        running, waiting = [], []
        for adapter in tuple(self._by_name.values()):
            resident = self.loader.resident.find(adapter.id)
            if resident is not None and resident.num_users:
                running.append(adapter.name)
            elif resident is None and self.loader.num_users(adapter.id):
                waiting.append(adapter.name)
        return tuple(running), tuple(waiting)

    def note_change(self) -> None:
        """Let routers learn of a change."""
        self.version += 1
        self._on_change()

    def _describe(self, adapter: AdapterRef) -> LoadedAdapter:
        resident = self.loader.resident.find(adapter.id)
        return LoadedAdapter(
            adapter,
            is_in_memory=resident is not None,
            num_bytes=0 if resident is None else resident.num_bytes,
            num_requests=self.loader.num_users(adapter.id),
            generation=self._generations.of(adapter.name) if adapter.name else 0,
        )

    def _check_name(self, name: str) -> None:
        check_name(name)
        if name == self._model:
            raise InvalidRequest(f"{name!r} is the name of the model; choose another one", "name")
        self._check_number(name)

    def _check_number(self, name: str) -> None:
        if name not in self._by_name and len(self._by_name) >= self._max_names:
            raise TooManyAdapters(
                f"this node has {self._max_names} adapters, which is its limit: unload one"
            )

    def _check_is_free(self, adapter: AdapterRef, can_replace: bool, generation: int) -> None:
        self._check_number(adapter.name)
        self._generations.check(adapter.name, generation, adapter.id)
        taken = self._by_name.get(adapter.name)
        if taken is not None and taken.id != adapter.id and not can_replace:
            raise AdapterExists(
                f"another adapter ({taken.id}) has the name {adapter.name!r}: unload it, or have "
                "it replaced"
            )

    def _set_name(self, adapter: AdapterRef, generation: int) -> None:
        self._generations.note_load(adapter.name, generation, adapter.id)
        replaced = self._by_name.get(adapter.name)
        self._by_name[adapter.name] = adapter
        self._num_names[adapter.id] += 1
        self._unnamed.pop(adapter.id, None)
        if adapter.id in self.loader.resident:
            self.loader.resident.keep(adapter.id)
        log.info("serve adapter %r (%s)", adapter.name, adapter.id)
        if replaced is not None:
            self._drop_name_of(replaced.id)
            if replaced.id in self.loader.resident:
                self._note_unnamed(replaced)
        self.note_change()

    def _drop_name_of(self, adapter_id: str) -> bool:
        """Return whether it was the last name of the adapter."""
        self._num_names[adapter_id] -= 1
        if self._num_names[adapter_id]:
            return False
        del self._num_names[adapter_id]
        return True

    def _note_unnamed(self, adapter: AdapterRef) -> None:
        """Note an adapter that a router knows, but no operator has loaded here."""
        if adapter.id not in self._unnamed and adapter.id not in self._num_names:
            self._unnamed[adapter.id] = AdapterRef("", adapter.id, adapter.path)
            self.note_change()

    def _folder_of(self, adapter: AdapterRef) -> Path:
        """Return where the files are. For any thread. Raises UnknownAdapter."""
        folder = self._folder_by_id.get(adapter.id)
        if folder is not None:
            return folder
        if not adapter.path:
            raise UnknownAdapter(
                f"this node does not have the adapter {adapter.name!r} ({adapter.id}), and the "
                "request names no folder of it"
            )
        try:
            return folder_below(self._root, adapter.path)
        except InvalidRequest as error:
            raise UnknownAdapter(f"adapter {adapter.name!r}: {error}") from error


def _by_name_and_id(adapter: AdapterRef) -> tuple[str, str]:
    return adapter.name, adapter.id
