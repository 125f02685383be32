"""Reads adapters into memory when requests need them. Only the asyncio thread uses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, Protocol

from baton.core.errors import ModelError
from baton.node.adapters.folder_threads import FolderThreads
from baton.rpc.adapters import LoadedAdapter
from baton.rpc.errors import AdaptersBusy, AdapterUnreadable

log = logging.getLogger(__name__)

MAX_PLACE_WAIT_S = 10.0
CLAIM_AFTER_S = 5.0
MAX_CLAIM_S = 60.0


FindFolder = Callable[[], Path]  # raises what requests for the adapter get


class ReadAdapter(NamedTuple):
    """An adapter that has been read from files."""

    num_bytes: int
    add: Callable[[], None]  # lets requests that are submitted from now on use it


class AdapterMemory(Protocol):
    """Reads adapters from folders, and holds those that the engine can use."""

    def digest(self, folder: Path) -> str:
        """Return the id of the adapter in a folder. Any thread can call it. Raises ModelError."""
        ...

    def read(self, folder: Path, adapter_id: str) -> ReadAdapter:
        """Read an adapter. Any thread can call it. Raises ModelError and AdapterUnreadable."""
        ...

    def remove(self, adapter_id: str) -> None:
        """Free its memory. No request in progress uses it."""
        ...


class Stage(Enum):
    """Stage of an adapter on its way into memory."""

    FINDING = auto()  # its folder
    WAITING = auto()  # for a place
    READING = auto()  # with a place
    IN_MEMORY = auto()


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """Adapter in memory, or on its way there."""

    id: str
    path: str = ""  # below the node's root, if it is there
    stage: Stage = Stage.FINDING
    num_users: int = 0  # requests that use it or wait for it
    num_bytes: int = 0
    number: int = 0  # in the order in which adapters came into memory
    is_kept: bool = True  # without users, until its place is needed
    load: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class AdapterCounts:
    """Adapters of a node, and requests that wait for them."""

    num_named: int = 0
    num_in_memory: int = 0
    num_in_use: int = 0  # of these
    num_reading: int = 0
    num_bytes: int = 0
    num_waiting_for_place: int = 0
    num_waiting_for_load: int = 0
    total_failed: int = 0
    total_evicted: int = 0


class AdapterLoader:
    """Loads each adapter once for all that need it, into one of `num_places`."""

    def __init__(
        self,
        memory: AdapterMemory,
        num_places: int,
        *,
        max_wait_s: float = MAX_PLACE_WAIT_S,
        claim_after_s: float = CLAIM_AFTER_S,
        max_claim_s: float = MAX_CLAIM_S,
        threads: FolderThreads | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_places = num_places
        self.total_evicted = self.total_failed = 0
        self.on_change: Callable[[], None] = lambda: None  # an adapter enters or leaves memory
        self.observe_load: Callable[[float], None] = lambda _: None  # seconds of one
        self._memory = memory
        self._max_wait_s = max_wait_s
        self._claim_after_s, self._max_claim_s = claim_after_s, max_claim_s
        self._clock = clock
        self._threads = threads or FolderThreads()
        self._adapters: OrderedDict[str, HeldAdapter] = OrderedDict()  # least recently used first
        self._num_filled = 0
        # Adapters that wait for a place, in order, and the times since when.
        self._queue: dict[HeldAdapter, float] = {}
        self._num_behind_claim = 0  # requests
        self._changed = asyncio.Event()  # a place may be free

    def __enter__(self) -> AdapterLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def find(self, adapter_id: str) -> HeldAdapter | None:
        """Return an adapter that is in memory. For any thread."""
        held = self._adapters.get(adapter_id)
        return held if held is not None and held.stage is Stage.IN_MEMORY else None

    def report(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters in memory, for routers."""
        return tuple(
            LoadedAdapter(each.id, each.path, each.num_bytes, each.num_users)
            for each in self._in(Stage.IN_MEMORY)
        )

    def num_users(self, adapter_id: str) -> int:
        """Return the number of requests that use an adapter, or wait for it. For any thread."""
        held = self._adapters.get(adapter_id)
        return 0 if held is None else held.num_users

    def counts(self, num_named: int = 0) -> AdapterCounts:
        """Return the current counts. For any thread."""
        in_memory, reading = self._in(Stage.IN_MEMORY), self._in(Stage.READING)
        for_place = sum(each.num_users for each in self._in(Stage.WAITING))
        return AdapterCounts(
            num_named,
            len(in_memory),
            sum(each.num_users > 0 for each in in_memory),
            len(reading),
            sum(each.num_bytes for each in in_memory),
            for_place + self._num_behind_claim,
            sum(each.num_users for each in (*reading, *self._in(Stage.FINDING))),
            self.total_failed,
            self.total_evicted,
        )

    async def digest(self, find_folder: FindFolder) -> str:
        """Return the id of the adapter in a folder, which is found on the thread, too."""
        return await self._threads.run(lambda: self._memory.digest(find_folder()))

    def read_at_start(self, folder: Path, path: str = "") -> str:
        """Read an adapter before there are requests, and return its id."""
        adapter_id = self._memory.digest(folder)
        if adapter_id not in self._adapters:
            began_s, read = self._clock(), self._memory.read(folder, adapter_id)
            self._make_room()
            self._put(HeldAdapter(adapter_id, path), read, self._clock() - began_s)
        return adapter_id

    @asynccontextmanager
    async def held(
        self, adapter_id: str, find_folder: FindFolder, path: str = ""
    ) -> AsyncGenerator[None]:
        """Keep an adapter in memory until the block ends. Reads it from its folder if needed.

        `find_folder` is called on a thread, since a file system can take long to answer.

        The first that waits for a place claims the oldest one after a time: the requests that use
        it end, and later ones wait behind the claim. Without that, they could use it for ever.

        Raises AdaptersBusy if all places are in use for `max_wait_s`, or a claimed one is for
        `max_claim_s`, or all threads hang, AdapterUnreadable, and what `find_folder` raises.
        """
        await self._wait_behind_claim(adapter_id)
        held = self._adapters.get(adapter_id) or self._start(adapter_id, find_folder, path)
        self._adapters.move_to_end(adapter_id)
        held.num_users += 1
        try:
            if held.load is not None:
                await asyncio.shield(held.load)
            yield
        finally:
            held.num_users -= 1
            self._drop_unless_needed(held)
            self._note_change()

    def keep(self, adapter_id: str, *, is_kept: bool) -> None:
        """Keep an adapter without users until its place is needed, or only for its users."""
        held = self.find(adapter_id)
        if held is not None:
            held.is_kept = is_kept
            self._drop_unless_needed(held)

    def _in(self, stage: Stage) -> list[HeldAdapter]:
        """Return the adapters in a stage. For any thread."""
        return [each for each in tuple(self._adapters.values()) if each.stage is stage]

    def _start(self, adapter_id: str, find_folder: FindFolder, path: str) -> HeldAdapter:
        held = self._adapters[adapter_id] = HeldAdapter(adapter_id, path)
        held.load = asyncio.ensure_future(self._load(held, find_folder))
        # Those that wait get its exception. Without any, nobody needs it.
        held.load.add_done_callback(lambda task: task.cancelled() or task.exception())
        return held

    async def _load(self, held: HeldAdapter, find_folder: FindFolder) -> None:
        try:
            folder = await self._threads.run(find_folder)  # none is evicted for a wrong path
            await self._take_place(held)
            began_s = self._clock()
            read = await self._threads.run(lambda: self._memory.read(folder, held.id))
            self._put(held, read, self._clock() - began_s)
        except BaseException as error:
            self.total_failed += held.stage is Stage.READING
            self._forget(held)
            if isinstance(error, ModelError):
                raise AdapterUnreadable(str(error)) from error
            raise

    def _put(self, held: HeldAdapter, read: ReadAdapter, seconds: float) -> None:
        read.add()
        self._num_filled += 1
        held.stage, held.load = Stage.IN_MEMORY, None
        held.number, held.num_bytes = self._num_filled, read.num_bytes
        self._adapters[held.id] = held
        self._adapters.move_to_end(held.id)
        self.observe_load(seconds)
        log.info("read adapter %s: %.1f MiB in %.3f s", held.id, held.num_bytes / 2**20, seconds)
        self._note_change()
        self.on_change()

    def _drop_unless_needed(self, held: HeldAdapter) -> None:
        """Remove an adapter that is not kept, or give up a load, if nobody waits for it."""
        if held.num_users:
            return
        if held.stage is Stage.IN_MEMORY and not held.is_kept:
            self._remove(held)
        elif held.stage in (Stage.FINDING, Stage.WAITING) and held.load is not None:
            held.load.cancel()
            self._forget(held)

    def _remove(self, held: HeldAdapter) -> None:
        self._memory.remove(held.id)
        log.info("removed adapter %s from memory", held.id)
        self._forget(held)
        self.on_change()

    def _forget(self, held: HeldAdapter) -> None:
        if self._adapters.get(held.id) is held:
            del self._adapters[held.id]
        self._note_change()

    # --- places -------------------------------------------------------------------

    async def _take_place(self, held: HeldAdapter) -> None:
        """Wait for a place. Raises AdaptersBusy."""
        held.stage = Stage.WAITING
        since_s = self._queue[held] = self._clock()
        try:
            while not (self._is_first(held) and self._make_room()):
                is_first = self._is_first(held)
                await self._wait(since_s + (self._max_claim_s if is_first else self._max_wait_s))
            held.stage = Stage.READING
        finally:
            del self._queue[held]
            self._note_change()

    async def _wait_behind_claim(self, adapter_id: str) -> None:
        """Wait while the first that waits for a place claims that of an adapter."""
        ends_s = self._clock() + self._max_wait_s
        self._num_behind_claim += 1
        try:
            while self._is_claimed(adapter_id):
                await self._wait(ends_s)
        finally:
            self._num_behind_claim -= 1

    async def _wait(self, until_s: float) -> None:
        """Wait for a change. Raises AdaptersBusy after a time."""
        try:
            async with asyncio.timeout(until_s - self._clock()):
                await self._changed.wait()
        except TimeoutError:
            raise AdaptersBusy(
                "requests use all places for adapters in memory (max-cpu-loras); none became free "
                "in time"
            ) from None

    def _note_change(self) -> None:
        """Have those that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _is_first(self, held: HeldAdapter) -> bool:
        return next(iter(self._queue)) is held

    def _is_claimed(self, adapter_id: str) -> bool:
        """Return whether the first that waits has waited long enough for this adapter's place."""
        held = self.find(adapter_id)
        if held is None or not self._queue:
            return False
        if held.number != min(each.number for each in self._in(Stage.IN_MEMORY)):
            return False
        return self._clock() - next(iter(self._queue.values())) >= self._claim_after_s

    def _make_room(self) -> bool:
        """Return whether a place is free. The least recently used adapter may be evicted for it."""
        in_memory = self._in(Stage.IN_MEMORY)
        if len(in_memory) + len(self._in(Stage.READING)) < self.num_places:
            return True
        oldest = next((each for each in in_memory if not each.num_users), None)
        if oldest is None:
            return False
        self.total_evicted += 1
        self._remove(oldest)
        return True
