"""Adapters of a node by name, and those that requests use."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from baton.core.errors import InvalidConfig, InvalidRequest, ModelError
from baton.core.ids import AdapterRef
from baton.node.adapters.config import AdapterFolder, check_id, check_name
from baton.node.adapters.folders import check_path, folder_below, path_below
from baton.node.adapters.loader import AdapterCounts, AdapterLoader
from baton.node.adapters.names import AdapterNames
from baton.rpc.errors import AdapterExists, AdapterUnreadable, TooManyAdapters, UnknownAdapter
from baton.rpc.node_info import LoadedAdapter, NameOrder, NodeAdapters, UnloadedAdapter

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
        self._names = AdapterNames()
        self._folder_by_id: dict[str, Path] = {}  # of those that were named at the start

    def read_at_start(self, adapters: Sequence[AdapterFolder]) -> None:
        """Read and name adapters before there are requests. Raises ModelError, InvalidConfig."""
        for name, folder in adapters:
            if name == self._model:
                raise InvalidConfig(f"--lora {name}: this is the name of the model")
            path = path_below(self._root, folder)
            adapter_id = self.loader.read_at_start(folder, path)
            self._folder_by_id[adapter_id] = folder
            # An operator's order, which has a generation, is later than any start.
            self._set_name(AdapterRef(name, adapter_id, path), 0)

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
        check_name(name)
        if name == self._model:
            raise InvalidRequest(f"{name!r} is the name of the model; choose another one", "name")
        self._check_number(name)
        generation = self._names.number(name, generation, self._clock_ns())
        try:
            adapter = await self._identify(name, path, adapter_id)
            self._check_is_free(adapter, can_replace, generation)
            async with self._keeping_replaced(adapter), self._in_memory(adapter):
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
        old = self._names.find(adapter.name)
        is_kept = old is not None and old.id != adapter.id and self.loader.num_places > 1
        if old is None or not is_kept or self.loader.find(old.id) is None:
            yield
            return
        async with self._in_memory(old):
            yield

    def unload(self, name: str, generation: int | None = None) -> None:
        """Forget a name. Requests in progress keep the adapter.

        Loads of a lower `generation` are refused from now on, also if the name is not known. Raises
        InvalidRequest, OutdatedOrder and UnknownAdapter.
        """
        check_name(name)
        order = NameOrder(name, self._names.number(name, generation, self._clock_ns()))
        self._names.check(order)
        adapter = self._names.find(name)
        self._names.note(order)
        self.note_change()
        if adapter is None:
            raise UnknownAdapter(f"this node has no adapter {name!r}")
        log.info("unloaded adapter %r (%s)", name, adapter.id)
        if adapter.id not in self._names.ids:
            self._folder_by_id.pop(adapter.id, None)
            self.loader.keep(adapter.id, is_kept=False)

    @asynccontextmanager
    async def held(self, adapter: AdapterRef) -> AsyncGenerator[None]:
        """Keep the adapter of a request in memory until the block ends.

        Raises AdaptersBusy, UnknownAdapter, and AdapterUnreadable if its files have changed.
        """
        if not adapter.id:
            yield
            return
        is_entered = False
        try:
            async with self._in_memory(adapter):
                is_entered = True
                yield
        except ModelError as error:
            if is_entered:
                raise
            raise AdapterUnreadable(f"adapter {adapter.name!r}: {error}") from error

    def report(self) -> NodeAdapters:
        """Return all adapters with a name, and those in memory without one."""
        ids = self._names.ids
        unnamed = [
            NameOrder("", 0, AdapterRef("", each.id, each.path))
            for each in self.loader.in_memory()
            if each.is_kept and each.id not in ids
        ]
        listed = map(self._describe, (*self._names.loaded.values(), *unnamed))
        return NodeAdapters(
            tuple(sorted(listed, key=_by_name_and_id)),
            tuple(
                UnloadedAdapter(each.name, each.generation)
                for each in self._names.unloaded.values()
            ),
        )

    def counts(self) -> AdapterCounts:
        """Return the current counts. For any thread."""
        return self.loader.counts(len(self._names.loaded))

    def names_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the adapters that requests use, and those they wait for. For any thread."""
        running: list[str] = []
        waiting: list[str] = []
        for name, order in tuple(self._names.loaded.items()):
            if self.loader.num_users(order.adapter_id):
                is_waiting = self.loader.find(order.adapter_id) is None
                (waiting if is_waiting else running).append(name)
        return tuple(running), tuple(waiting)

    def note_change(self) -> None:
        """Let routers learn of a change."""
        self.version += 1
        self._on_change()

    def _describe(self, order: NameOrder) -> LoadedAdapter:
        assert order.adapter is not None
        held = self.loader.find(order.adapter_id)
        return LoadedAdapter(
            order.adapter,
            is_in_memory=held is not None,
            num_bytes=0 if held is None else held.num_bytes,
            num_requests=self.loader.num_users(order.adapter_id),
            generation=order.generation,
        )

    def _check_number(self, name: str) -> None:
        if self._names.find(name) is None and len(self._names.loaded) >= self._max_names:
            raise TooManyAdapters(
                f"this node has {self._max_names} adapters, which is its limit: unload one"
            )

    def _check_is_free(self, adapter: AdapterRef, can_replace: bool, generation: int) -> None:
        self._check_number(adapter.name)
        self._names.check(NameOrder(adapter.name, generation, adapter))
        taken = self._names.find(adapter.name)
        if taken is not None and taken.id != adapter.id and not can_replace:
            raise AdapterExists(
                f"another adapter ({taken.id}) has the name {adapter.name!r}: unload it, or have "
                "it replaced"
            )

    def _set_name(self, adapter: AdapterRef, generation: int) -> None:
        self._names.note(NameOrder(adapter.name, generation, adapter))
        self.loader.keep(adapter.id, is_kept=True)
        log.info("serve adapter %r (%s)", adapter.name, adapter.id)
        self.note_change()

    def _in_memory(self, adapter: AdapterRef) -> AbstractAsyncContextManager[None]:
        return self.loader.held(adapter.id, partial(self._folder_of, adapter), adapter.path)

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


def _by_name_and_id(loaded: LoadedAdapter) -> tuple[str, str]:
    return loaded.adapter.name, loaded.adapter.id
