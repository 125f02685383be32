"""Reads adapters into memory when requests need them. Only the asyncio thread uses it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from baton.node.adapters.folder_threads import FolderThreads
from baton.node.adapters.resident_adapters import ResidentAdapters
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


class _Load:
    """Adapter on its way into memory, and how many requests wait for it."""

    def __init__(self) -> None:
        self.num_users = 0
        self.waits_for_place = False
        self.is_reading = False
        self.is_over = False
        self.task: asyncio.Task[None]


class _Turn:
    """A load that waits for a place."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.place: asyncio.Future[None] = asyncio.get_running_loop().create_future()


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
        self.resident = ResidentAdapters(num_places)
        self.total_evicted = self.total_failed = 0
        self.on_change: Callable[[], None] = lambda: None  # an adapter enters or leaves memory
        self.observe_load: Callable[[float], None] = lambda _: None  # seconds of one
        self._memory = memory
        self._max_wait_s = max_wait_s
        self._claim_after_s, self._max_claim_s = claim_after_s, max_claim_s
        self._clock = clock
        self._threads = threads or FolderThreads()
        self._loads: dict[str, _Load] = {}
        self._waiting: deque[_Turn] = deque()  # the first first

    def __enter__(self) -> AdapterLoader[Loaded]:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()

    def num_waiting(self, *, for_place: bool) -> int:
        """Return the number of requests that wait for a place, or for a load. For any thread."""
        loads = tuple(self._loads.values())
        return sum(load.num_users for load in loads if load.waits_for_place is for_place)

    def num_users(self, adapter_id: str) -> int:
        """Return the number of requests that use an adapter, or wait for it."""
        load, resident = self._loads.get(adapter_id), self.resident.find(adapter_id)
        return (load.num_users if load else 0) + (resident.num_users if resident else 0)

    def keeps_beside_loads(self, adapter_id: str) -> bool:
        """Return whether an adapter in memory can stay there while another one is read."""
        return adapter_id in self.resident and self.resident.num_places > 1

    async def digest(self, find_folder: FindFolder) -> str:
        """Return the id of the adapter in a folder, which is found on the thread, too."""
        return await self._threads.run(lambda: self._memory.digest(find_folder()))

    def read_at_start(self, folder: Path) -> str:
        """Read an adapter before there are requests, and return its id."""
        adapter_id = self._memory.digest(folder)
        if adapter_id not in self.resident:
            began_s, loaded = self._clock(), self._memory.read(folder, adapter_id)
            self._evict(self.resident.reserve() or [])
            self._put(adapter_id, loaded, 0, self._clock() - began_s)
        return adapter_id

    @asynccontextmanager
    async def held(self, adapter_id: str, find_folder: FindFolder) -> AsyncGenerator[None]:
        """Keep an adapter in memory until the block ends. Reads it from its folder if needed.

        `find_folder` is called on a thread, since a file system can take long to answer.

        The first that waits for a place claims the oldest one after a time: the requests that use
        it end, and later ones wait behind the claim. Without that, they could use it for ever.

        Raises AdaptersBusy if all places are in use for `max_wait_s`, or a claimed one is for
        `max_claim_s`, or all threads hang, and what reading raises.
        """
        if adapter_id in self.resident and not self._is_claimed(adapter_id):
            self.resident.use(adapter_id)
        else:
            load = self._loads.get(adapter_id) or self._start(adapter_id, find_folder)
            await self._join(load, adapter_id)
        try:
            yield
        finally:
            self._release(adapter_id)

    def forget(self, adapter_id: str) -> None:
        """Free the memory of an adapter as soon as no request uses it."""
        if self.resident.forget(adapter_id):
            self._remove(adapter_id)

    def _start(self, adapter_id: str, find_folder: FindFolder) -> _Load:
        load = self._loads[adapter_id] = _Load()
        load.task = asyncio.ensure_future(self._load(load, adapter_id, find_folder))
        # Those that wait get its exception. Without any, nobody needs it.
        load.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    async def _join(self, load: _Load, adapter_id: str) -> None:
        """Wait for a load as one of its users."""
        load.num_users += 1
        try:
            await asyncio.shield(load.task)
        except BaseException:
            if load.is_over:  # it had come in when this request was cancelled
                self._release(adapter_id)
            else:
                self._leave(load, adapter_id)
            raise

    def _leave(self, load: _Load, adapter_id: str) -> None:
        load.num_users -= 1
        if not load.num_users and not load.is_reading and self._loads.get(adapter_id) is load:
            del self._loads[adapter_id]
            load.task.cancel()

    async def _load(self, load: _Load, adapter_id: str, find_folder: FindFolder) -> None:
        try:
            folder = await self._threads.run(find_folder)  # none is evicted for a wrong path
            load.waits_for_place = True
            await self._reserve()
            load.waits_for_place = False
            if adapter_id in self.resident:  # another place became free than the claimed one
                load.is_over = True
                self.resident.give_back()
                self.resident.use(adapter_id, load.num_users)
                self._pass_places_on()
                return
            load.is_reading = True
            began_s = self._clock()
            try:
                loaded = await self._threads.run(lambda: self._memory.read(folder, adapter_id))
            except BaseException:
                self.total_failed += 1
                self.resident.give_back()
                self._pass_places_on()
                raise
            load.is_over = True
            self._put(adapter_id, loaded, load.num_users, self._clock() - began_s)
        finally:
            if self._loads.get(adapter_id) is load:
                del self._loads[adapter_id]

    def _put(self, adapter_id: str, loaded: Loaded, num_users: int, seconds: float) -> None:
        self._memory.add(adapter_id, loaded)
        self.resident.fill(adapter_id, loaded.num_bytes, num_users)
        self.observe_load(seconds)
        mib = loaded.num_bytes / 2**20
        log.info("read adapter %s: %.1f MiB in %.3f s", adapter_id, mib, seconds)
        if not num_users:
            self._pass_places_on()
        self.on_change()

    def _release(self, adapter_id: str) -> None:
        if self.resident.release(adapter_id):
            self._remove(adapter_id)
        self._pass_places_on()

    # --- places -------------------------------------------------------------------

    async def _reserve(self) -> None:
        """Wait for a place, and reserve it. Raises AdaptersBusy."""
        evicted = self.resident.reserve()
        if evicted is not None:
            self._evict(evicted)
            return
        turn = _Turn(self._clock())
        self._waiting.append(turn)
        try:
            await self._await_place(turn)
        except BaseException:
            if turn.place.done():  # it came too late
                self.resident.give_back()
            else:
                self._waiting.remove(turn)
            self._pass_places_on()
            raise

    async def _await_place(self, turn: _Turn) -> None:
        await asyncio.wait([turn.place], timeout=self._max_wait_s)
        if not turn.place.done() and self._waiting[0] is turn:
            await asyncio.wait([turn.place], timeout=self._max_claim_s - self._max_wait_s)
        if not turn.place.done():
            waited_s = self._clock() - turn.since_s
            raise AdaptersBusy(
                "requests use all places for adapters in memory (--max-cpu-loras); none became "
                f"free within {waited_s:.2g} s"
            )

    def _is_claimed(self, adapter_id: str) -> bool:
        """Return whether the first that waits has waited long enough for this adapter's place."""
        if not self._waiting or adapter_id != self.resident.oldest:
            return False
        return self._clock() - self._waiting[0].since_s >= self._claim_after_s

    def _pass_places_on(self) -> None:
        """Reserve places for those that wait, as far as there are any."""
        while self._waiting:
            evicted = self.resident.reserve()
            if evicted is None:
                return
            self._evict(evicted)
            self._waiting.popleft().place.set_result(None)

    def _evict(self, adapter_ids: list[str]) -> None:
        for adapter_id in adapter_ids:
            self.total_evicted += 1
            self._remove(adapter_id)

    def _remove(self, adapter_id: str) -> None:
        self._memory.remove(adapter_id)
        log.info("removed adapter %s from memory", adapter_id)
        self.on_change()
