"""Adapters of a node by name, and those that requests use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath

from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS
from baton.core.errors import InvalidConfig, InvalidRequest, ModelError
from baton.core.ids import AdapterRef
from baton.node.adapters.config import AdapterFolder, check_id, check_name
from baton.node.adapters.loader import AdapterCounts, AdapterLoader
from baton.rpc.adapters import MAX_NAMES, AdapterNames, NameOrder, NodeAdapters
from baton.rpc.errors import AdapterUnreadable, TooManyAdapters

log = logging.getLogger(__name__)

MAX_NUMBER = 2**62  # of orders: in the year 2116, and far from the end of an int64
MAX_PATH_CHARACTERS = 512


class AdapterRegistry:
    """Names of adapters, and where their files are. Only the asyncio thread uses it."""

    def __init__(
        self,
        loader: AdapterLoader,
        root: Path | None,
        model: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`root` is the folder of those that are read while the node runs."""
        self.loader = loader
        self.version = 0  # grows with each change of what `report` returns, except of the requests
        self._root = root
        self._model = model
        self._on_change = on_change
        loader.on_change = self.note_change
        self._names = AdapterNames()
        # Each read can need a place besides that of the adapter that it keeps.
        self._reads = asyncio.Semaphore(max(1, loader.num_places - 1))
        self._folder_by_id: dict[str, Path] = {}  # of those that were named at the start

    def read_at_start(self, adapters: Sequence[AdapterFolder]) -> None:
        """Read and name adapters before there are requests. Raises ModelError, InvalidConfig."""
        for name, folder in adapters:
            if name == self._model:
                raise InvalidConfig(f"--lora {name}: this is the name of the model")
            path = path_below(self._root, folder)
            adapter_id = self.loader.read_at_start(folder, path)
            self._folder_by_id[adapter_id] = folder
            self._names.merge(NameOrder(name, adapter=AdapterRef(name, adapter_id, path)))
        self.note_change()

    async def read(self, path: str, name: str) -> AdapterRef:
        """Read an adapter below the root into memory. It can be given the name afterwards.

        The adapter that has the name stays in memory: its files may be those of the new one
        already. With one place it cannot stay.

        Raises InvalidRequest for what cannot be served, and AdaptersBusy.
        """
        try:
            adapter_id = await self.loader.digest(partial(folder_below, self._root, path))
            adapter = AdapterRef(name, adapter_id, PurePosixPath(path).as_posix())
            async with self._reads, self._kept(self._names.find(name)), self._in_memory(adapter):
                self.loader.keep(adapter.id, is_kept=True)
        except (ModelError, AdapterUnreadable) as error:
            raise InvalidRequest(str(error), "path") from error
        return adapter

    def set_names(self, orders: Sequence[NameOrder]) -> None:
        """Merge orders about names. Those that come too late change nothing.

        An adapter whose name is removed leaves memory after its last request; one that is replaced
        leaves it when its place is needed. Raises InvalidRequest and TooManyAdapters.
        """
        for order in orders:
            _check_order(order, self._model)
        after = self._names.orders | {order.name: order for order in orders}
        num_named = sum(each.adapter is not None and each.number > 0 for each in after.values())
        if num_named > MAX_NAMES:
            raise TooManyAdapters(
                f"this node takes {MAX_NAMES} names of adapters, not {num_named}: unload some"
            )
        removed = set()
        for order in orders:
            before = self._names.find(order.name)
            if self._names.merge(order):
                log.info("adapter %r: %s", order.name, order.adapter or "the name is removed")
                if order.adapter is None and before is not None:
                    removed.add(before.id)
        for adapter_id in removed - {adapter.id for adapter in self._names.named}:
            self.loader.keep(adapter_id, is_kept=False)
        self.note_change()

    def held(self, adapter: AdapterRef) -> AbstractAsyncContextManager[None]:
        """Keep the adapter of a request in memory until the block ends.

        Raises AdaptersBusy and AdapterUnreadable.
        """
        return self._in_memory(adapter) if adapter.id else nullcontext()

    def report(self) -> NodeAdapters:
        return NodeAdapters(tuple(self._names.orders.values()), self.loader.report())

    def counts(self) -> AdapterCounts:
        """Return the current counts. For any thread."""
        return self.loader.counts(len(self._names.named))

    def names_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the adapters that requests use, and those they wait for. For any thread."""
        running: list[str] = []
        waiting: list[str] = []
        for adapter in self._names.named:
            if self.loader.num_users(adapter.id):
                is_waiting = self.loader.find(adapter.id) is None
                (waiting if is_waiting else running).append(adapter.name)
        return tuple(running), tuple(waiting)

    def note_change(self) -> None:
        """Let routers learn of a change."""
        self.version += 1
        self._on_change()

    def _kept(self, adapter: AdapterRef | None) -> AbstractAsyncContextManager[None]:
        if adapter is None or self.loader.num_places == 1 or not self.loader.find(adapter.id):
            return nullcontext()
        return self._in_memory(adapter)

    def _in_memory(self, adapter: AdapterRef) -> AbstractAsyncContextManager[None]:
        return self.loader.held(adapter.id, partial(self._folder_of, adapter), adapter.path)

    def _folder_of(self, adapter: AdapterRef) -> Path:
        """Return where the files are. For any thread. Raises AdapterUnreadable."""
        folder = self._folder_by_id.get(adapter.id)
        if folder is not None:
            return folder
        if not adapter.path:
            raise AdapterUnreadable(
                f"this node does not have the adapter {adapter.name!r} ({adapter.id}), and the "
                "request names no folder of it"
            )
        try:
            return folder_below(self._root, adapter.path)
        except InvalidRequest as error:
            raise AdapterUnreadable(f"adapter {adapter.name!r}: {error}") from error


def _check_order(order: NameOrder, model: str) -> None:
    """Raises InvalidRequest."""
    check_name(order.name)
    if order.name == model:
        raise InvalidRequest(f"{model!r} is the name of the model; choose another one", "name")
    if not 0 < order.number <= MAX_NUMBER:
        raise InvalidRequest(
            "number must be a time in nanoseconds since 1970, at most 2**62: correct the clock of "
            "the router",
            "number",
        )
    adapter = order.adapter
    if adapter is None:
        return
    check_id(adapter.id)
    if adapter.name != order.name:
        raise InvalidRequest("an order and its adapter must have the same name", "name")
    if adapter.path:  # else the node has it from its start, or gets no requests for it
        check_path(adapter.path)


def folder_below(root: Path | None, path: str) -> Path:
    """Return the folder of a path relative to `root`.

    Raises InvalidRequest for a path that leads elsewhere, also by symbolic links of its files.
    """
    if root is None:
        raise InvalidRequest("this node loads no adapters: start it with --lora-root", "path")
    check_path(path)
    real_root, folder = root.resolve(), root / path
    for file in (folder / CONFIG, folder / WEIGHTS):
        try:
            real = file.resolve()
            is_below, is_file = real.is_relative_to(real_root), real.is_file()
        except (OSError, RuntimeError) as error:  # RuntimeError: links that form a loop
            raise InvalidRequest(f"path {path!r} cannot be read: {error}", "path") from error
        if not is_below:
            raise InvalidRequest(
                f"path {path!r}: a symbolic link leads out of the node's --lora-root", "path"
            )
        if not is_file:
            raise InvalidRequest(f"path {path!r}: there is no file {file.name} in it", "path")
    return folder


def check_path(path: str) -> None:
    """Raise InvalidRequest unless the path has the form of one below a node's root."""
    if len(path) > MAX_PATH_CHARACTERS or not path.isprintable():
        raise InvalidRequest(
            f"path must have at most {MAX_PATH_CHARACTERS} printable characters", "path"
        )
    parts = PurePosixPath(path)
    if not parts.parts or parts.is_absolute() or ".." in parts.parts:
        raise InvalidRequest(
            f"path {path!r}: it must be relative to the node's --lora-root, without '..'", "path"
        )


def path_below(root: Path | None, folder: Path) -> str:
    """Return the path of a folder relative to `root`; empty if it is elsewhere."""
    if root is None:
        return ""
    real, real_root = folder.resolve(), root.resolve()
    is_below = real.is_relative_to(real_root) and real != real_root
    return real.relative_to(real_root).as_posix() if is_below else ""
