"""Reads adapters into memory when requests need them. Only the asyncio thread uses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from baton.node.adapters.folder_threads import FolderThreads
from baton.rpc.adapters import LoadedAdapter
from baton.rpc.errors import AdaptersBusy

log = logging.getLogger(__name__)

MAX_PLACE_WAIT_S = 10.0
CLAIM_AFTER_S = 5.0
MAX_CLAIM_S = 60.0


class HasBytes(Protocol):
    @property
    def num_bytes(self) -> int: ...


Loaded = TypeVar("Loaded", bound=HasBytes)
FindFolder = Callable[[], Path]  # raises what requests for the adapter get


class AdapterMemory(Protocol[Loaded]):
    """Reads adapters from folders, and holds those that the engine can use."""

    def digest(self, folder: Path) -> str:
        """Return the id of the adapter in a folder. Any thread can call it. Raises ModelError."""
        ...

    def read(self, folder: Path, adapter_id: str) -> Loaded:
        """Read an adapter. Any thread can call it. Raises ModelError and AdapterUnreadable."""
        ...

    def add(self, adapter_id: str, adapter: Loaded) -> None:
        """Let requests that are submitted from now on use it."""
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
    waits_since_s: float = 0.0
    place: asyncio.Future[None] | None = None  # of a load
    task: asyncio.Task[None] | None = None  # of a load


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


class AdapterLoader(Generic[Loaded]):
    """Loads each adapter once for all that need it, into one of `num_places`."""

    def __init__(
        self,
        memory: AdapterMemory[Loaded],
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
        # In memory or being read, the least recently used first.
        self._places: OrderedDict[str, HeldAdapter] = OrderedDict()
        self._num_filled = 0
        self._loads: dict[str, HeldAdapter] = {}
        self._queue: deque[HeldAdapter] = deque()  # loads that wait for a place, in order

    def __enter__(self) -> AdapterLoader[Loaded]:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def find(self, adapter_id: str) -> HeldAdapter | None:
        """Return an adapter that is in memory. For any thread."""
        held = self._places.get(adapter_id)
        return held if held is not None and held.stage is Stage.IN_MEMORY else None

    def in_memory(self) -> list[HeldAdapter]:
        """Return the adapters in memory. For any thread."""
        return [each for each in tuple(self._places.values()) if each.stage is Stage.IN_MEMORY]

    def report(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters in memory, for routers."""
        return tuple(
            LoadedAdapter(each.id, each.path, each.num_bytes, each.num_users)
            for each in self.in_memory()
        )

    def num_users(self, adapter_id: str) -> int:
        """Return the number of requests that use an adapter, or wait for it. For any thread."""
        load, held = self._loads.get(adapter_id), self.find(adapter_id)
        return (load.num_users if load else 0) + (held.num_users if held else 0)

    def counts(self, num_named: int = 0) -> AdapterCounts:
        """Return the current counts. For any thread."""
        in_memory, loads = self.in_memory(), tuple(self._loads.values())
        waiting = sum(each.num_users for each in loads)
        waiting_for_place = sum(each.num_users for each in loads if each.stage is Stage.WAITING)
        return AdapterCounts(
            num_named,
            len(in_memory),
            sum(each.num_users > 0 for each in in_memory),
            len(self._places) - len(in_memory),
            sum(each.num_bytes for each in in_memory),
            waiting_for_place,
            waiting - waiting_for_place,
            self.total_failed,
            self.total_evicted,
        )

    async def digest(self, find_folder: FindFolder) -> str:
        """Return the id of the adapter in a folder, which is found on the thread, too."""
        return await self._threads.run(lambda: self._memory.digest(find_folder()))

    def read_at_start(self, folder: Path, path: str = "") -> str:
        """Read an adapter before there are requests, and return its id."""
        adapter_id = self._memory.digest(folder)
        if adapter_id not in self._places:
            began_s, loaded = self._clock(), self._memory.read(folder, adapter_id)
            self._make_room()
            self._put(HeldAdapter(adapter_id, path), loaded, self._clock() - began_s)
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
        `max_claim_s`, or all threads hang, and what reading raises.
        """
        held = self.find(adapter_id)
        if held is None or self._is_claimed(held):
            held = self._loads.get(adapter_id) or self._start(adapter_id, find_folder, path)
        else:
            self._places.move_to_end(adapter_id)
        held.num_users += 1
        try:
            if held.task is not None:
                await asyncio.shield(held.task)
            yield
        finally:
            self._release(held)

    def keep(self, adapter_id: str, *, is_kept: bool) -> None:
        """Keep an adapter without users until its place is needed, or only for its users."""
        held = self.find(adapter_id)
        if held is not None:
            held.is_kept = is_kept
            self._drop_unless_needed(held)

    def _start(self, adapter_id: str, find_folder: FindFolder, path: str) -> HeldAdapter:
        load = self._loads[adapter_id] = HeldAdapter(adapter_id, path)
        load.task = asyncio.ensure_future(self._load(load, find_folder))
        # Those that wait get its exception. Without any, nobody needs it.
        load.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    async def _load(self, load: HeldAdapter, find_folder: FindFolder) -> None:
        try:
            folder = await self._threads.run(find_folder)  # none is evicted for a wrong path
            await self._take_place(load)
            if load.stage is Stage.READING:
                began_s = self._clock()
                loaded = await self._threads.run(lambda: self._memory.read(folder, load.id))
                self._put(load, loaded, self._clock() - began_s)
        except BaseException:
            if load.stage is Stage.READING:
                self.total_failed += 1
                del self._places[load.id]
                self._pass_places_on()
            raise
        finally:
            if self._loads.get(load.id) is load:
                del self._loads[load.id]

    def _put(self, held: HeldAdapter, loaded: Loaded, seconds: float) -> None:
        self._memory.add(held.id, loaded)
        self._num_filled += 1
        held.stage, held.number, held.num_bytes = (
            Stage.IN_MEMORY,
            self._num_filled,
            loaded.num_bytes,
        )
        self._places[held.id] = held
        self._places.move_to_end(held.id)
        self.observe_load(seconds)
        log.info("read adapter %s: %.1f MiB in %.3f s", held.id, held.num_bytes / 2**20, seconds)
        self._pass_places_on()
        self.on_change()

    def _release(self, held: HeldAdapter) -> None:
        """Count a user less, of an adapter in memory or of a load."""
        if held.stage is Stage.IN_MEMORY:
            held = self._places[held.id]  # that of another load, if its place was not claimed
        held.num_users -= 1
        if held.stage is Stage.IN_MEMORY:
            self._drop_unless_needed(held)
            self._pass_places_on()
        elif not held.num_users and held.stage is not Stage.READING:
            self._cancel(held)

    def _cancel(self, load: HeldAdapter) -> None:
        """Forget a load that nobody waits for."""
        if self._loads.get(load.id) is load:
            del self._loads[load.id]
        assert load.task is not None
        load.task.cancel()
        self._leave_queue(load)

    # --- places -------------------------------------------------------------------

    async def _take_place(self, load: HeldAdapter) -> None:
        """Wait for a place, or until the adapter is in memory. Raises AdaptersBusy."""
        load.stage, load.waits_since_s = Stage.WAITING, self._clock()
        load.place = place = asyncio.get_running_loop().create_future()
        self._queue.append(load)
        self._pass_places_on()
        try:
            await asyncio.wait([place], timeout=self._max_wait_s)
            if not place.done() and self._queue[0] is load:
                await asyncio.wait([place], timeout=self._max_claim_s - self._max_wait_s)
            if not place.done():
                raise AdaptersBusy(
                    "requests use all places for adapters in memory (max-cpu-loras); none "
                    f"became free within {self._clock() - load.waits_since_s:.2g} s"
                )
        finally:
            self._leave_queue(load)

    def _leave_queue(self, load: HeldAdapter) -> None:
        if load in self._queue:
            self._queue.remove(load)
            self._pass_places_on()

    def _is_claimed(self, held: HeldAdapter) -> bool:
        """Return whether the first that waits has waited long enough for this adapter's place."""
        if not self._queue or held.number != min(each.number for each in self.in_memory()):
            return False
        return self._clock() - self._queue[0].waits_since_s >= self._claim_after_s

    def _pass_places_on(self) -> None:
        """Give places to those that wait, as far as there are any."""
        while self._queue:
            load = self._queue[0]
            held = self.find(load.id)
            if held is not None:  # another place became free than the claimed one
                load.stage = Stage.IN_MEMORY
                held.num_users += load.num_users
                self._places.move_to_end(held.id)
                del self._loads[load.id]
            elif self._make_room():
                load.stage = Stage.READING
                self._places[load.id] = load
            else:
                return
            self._queue.popleft()
            assert load.place is not None
            load.place.set_result(None)

    def _make_room(self) -> bool:
        """Return whether a place is free. The least recently used adapter may be evicted for it."""
        if len(self._places) < self.num_places:
            return True
        oldest = next((each for each in self.in_memory() if not each.num_users), None)
        if oldest is None:
            return False
        self.total_evicted += 1
        self._remove(oldest)
        return True

    def _drop_unless_needed(self, held: HeldAdapter) -> None:
        if not held.num_users and not held.is_kept:
            self._remove(held)

    def _remove(self, held: HeldAdapter) -> None:
        del self._places[held.id]
        self._memory.remove(held.id)
        log.info("removed adapter %s from memory", held.id)
        self.on_change()
