"""KV blocks in an object store, which nodes on all hosts may share.

A block is one object, named after the block and its tenant: a header with its digest, and its
bytes. An object is written as a whole, so a reader finds all of it or nothing. The names of the
objects are listed when a node starts; after that, processes publish what they write and
remove in `JournalObjects`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from threading import Lock

import numpy as np
from xxhash import xxh3_128_digest

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, Tenant
from baton.kv_transfer.tiers.block_memory import BlockMemory
from baton.kv_transfer.tiers.eviction import EvictionOrder
from baton.kv_transfer.tiers.stores.journal_objects import CLEARED, JournalObjects
from baton.kv_transfer.tiers.stores.objects import ObjectInfo, Objects
from baton.kv_transfer.tiers.stores.stored_blocks import (
    HEADER_BYTES,
    REMOVED,
    WRITTEN,
    block_of,
    digest_in_header,
    namespace_of,
    pack_header,
    stem_of,
)

DELETE_OBJECTS = 1000  # at a time

_Victim = tuple[BlockName, Tenant]


class ObjectStore:
    """Implements BlockStore. Several threads may read and write at a time."""

    def __init__(
        self,
        objects: Objects,
        fingerprint: str,
        block_bytes: int,
        max_bytes: int,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        self._block_bytes = block_bytes
        self._object_bytes = block_bytes + HEADER_BYTES
        self._max_blocks = max_bytes // self._object_bytes
        if not self._max_blocks:
            raise InvalidConfig(
                f"--kv-object-store-size is {max_bytes} bytes; a block takes {self._object_bytes}"
            )
        namespace = namespace_of(fingerprint)
        self._blocks = f"{namespace}/blocks/"
        self._journals = JournalObjects(objects, f"{namespace}/journals/", clock)
        self._clock = clock
        self._lock = Lock()
        self.order = EvictionOrder(self._max_blocks, tenant_share)  # under the lock
        self._pages: Iterator[list[ObjectInfo]] | None = None  # while names are listed
        self._found: list[tuple[float, BlockName, Tenant]] = []
        self.num_evicted = 0

    @property
    def num_bytes(self) -> int:
        return len(self.order) * self._object_bytes

    @property
    def max_bytes(self) -> int:
        return self._max_blocks * self._object_bytes

    def holds(self, name: BlockName) -> bool:
        return name in self.order

    def hints_of(self, name: BlockName) -> BlockHints:
        with self._lock:
            return self.order.hints_of(name, self._clock())

    # --- blocks ----------------------------------------------------------------------------

    def read(self, name: BlockName, memory: BlockMemory, block: int) -> bytes | None:
        """Read a block and return its digest; None if there is no valid one.

        Nothing is written to the memory after the call, nor before the digest is verified.
        """
        try:
            content = self._objects.get(self._key_of(name), self._object_bytes)
        except FileNotFoundError:
            self._forget(name)
            return None
        digest = None if content is None else self._valid_digest(content, name)
        if content is None or digest is None:
            self._remove_damaged(name)
            return None
        _copy_out(content[HEADER_BYTES:], memory, block)
        with self._lock:
            self.order.touch(name)
        return digest

    def write(
        self,
        name: BlockName,
        memory: BlockMemory,
        block: int,
        digest: bytes,
        hints: BlockHints = NO_HINTS,
    ) -> None:
        """Write a block. Another process may write it as well: the content is the same."""
        self._evict(self._take_victims(hints.tenant))
        stem = stem_of(name, hints.tenant)
        header = pack_header(name, digest, self._block_bytes)
        self._objects.put(self._blocks + stem, (header, memory.view(block)))
        self._journals.note(WRITTEN, stem)
        with self._lock:
            self.order.add(name, hints, self._clock())

    def use(self, names: Iterable[BlockName], hints: BlockHints) -> None:
        """Note the use of those of the blocks that are here, and apply the hints of the request.

        Both are forgotten at a restart.
        """
        with self._lock:
            for name in names:
                self.order.use(name, hints, self._clock())

    def remove(self, name: BlockName) -> None:
        """Remove a block, also one that is not known here, whichever tenant it is stored for."""
        self._objects.delete(self._keys_of(name))
        self._forget(name)  # not before its object is gone: what fails is repeated
        self._journals.note(REMOVED, name.hex())

    def clear(self) -> None:
        """Delete all blocks, of other processes too."""
        self._pages, self._found = None, []
        self._journals.skip()
        for page in self._objects.list(self._blocks):
            self._objects.delete([info.key for info in page])
        self._forget_all()
        self._journals.note(CLEARED)

    # --- names -----------------------------------------------------------------------------

    def scan(self) -> bool:
        """List one page of names. Returns whether that was the last one."""
        if self._pages is None:
            self._journals.skip()  # what they name is listed
            self._pages = self._objects.list(self._blocks)
        try:
            page = next(self._pages, None)
        except OSError:
            self._pages = None
            raise
        if page is not None:
            self._found += self._blocks_in(page)
            return False
        self._learn(sorted(self._found))
        self._pages, self._found = None, []
        return True

    def refresh(self) -> None:
        """Publish own changes, apply those of others, and delete what is over the limit."""
        self._journals.publish()
        for sign, stem in self._journals.read():
            self._apply(sign, stem)
        self._evict(self._take_excess())

    def close(self) -> None:
        """Publish the last changes. The journal is deleted by others once it is old."""
        self._journals.publish()

    def _blocks_in(self, page: Iterable[ObjectInfo]) -> Iterator[tuple[float, BlockName, Tenant]]:
        for info in page:
            with suppress(ValueError):  # not ours
                name, tenant = block_of(info.key.rpartition("/")[2])
                if info.num_bytes == self._object_bytes:
                    yield info.changed_s, name, tenant

    def _learn(self, found: Iterable[tuple[float, BlockName, Tenant]]) -> None:
        """Add blocks as the least recently used ones."""
        with self._lock:
            known, now = self.order.names, self._clock()
            for _, name, tenant in found:
                if name not in self.order:
                    self.order.add(name, BlockHints(tenant), now)
            for name in known:
                self.order.touch(name)

    def _apply(self, sign: str, stem: str) -> None:
        """Apply a change by another process."""
        if sign == CLEARED:
            self._forget_all()
            return
        with suppress(ValueError):  # not ours
            name, tenant = block_of(stem)
            with self._lock:
                if sign == REMOVED:
                    self.order.remove(name)
                elif name not in self.order:
                    self.order.add(name, BlockHints(tenant), self._clock())

    def _remove_damaged(self, name: BlockName) -> None:
        try:
            self.remove(name)
        except OSError:
            self._forget(name)

    def _forget(self, name: BlockName) -> None:
        with self._lock:
            self.order.remove(name)

    def _forget_all(self) -> None:
        with self._lock:
            for name in self.order.names:
                self.order.remove(name)

    # --- eviction --------------------------------------------------------------------------

    def _take_victims(self, tenant: Tenant) -> list[_Victim]:
        """Forget blocks that have to make room for one of the tenant."""
        victims = []
        with self._lock:
            while self.order.is_full_for(tenant) and (victim := self._take_victim(tenant)):
                victims.append(victim)
        return victims

    def _take_excess(self) -> list[_Victim]:
        """Forget blocks over the limit, which others have written."""
        victims: list[_Victim] = []
        with self._lock:
            while len(self.order) > self._max_blocks and len(victims) < DELETE_OBJECTS:
                victim = self._take_victim(SHARED)
                if victim is None:
                    break
                victims.append(victim)
        return victims

    def _take_victim(self, tenant: Tenant) -> _Victim | None:
        name = next(self.order.victims(tenant, self._clock()), None)
        if name is None:
            return None
        victim = name, self.order.tenant_of(name)
        self.order.remove(name)
        return victim

    def _evict(self, victims: Sequence[_Victim]) -> None:
        """Delete blocks that were forgotten. If that fails, they count again."""
        if not victims:
            return
        stems = [stem_of(*victim) for victim in victims]
        try:
            self._objects.delete([self._blocks + stem for stem in stems])
        except OSError:
            self._restore(victims)
            raise
        for stem in stems:
            self._journals.note(REMOVED, stem)
        with self._lock:
            self.num_evicted += len(victims)

    def _restore(self, victims: Iterable[_Victim]) -> None:
        with self._lock:
            for name, tenant in victims:
                if name not in self.order:  # it is still the first one to be evicted
                    self.order.add(name, BlockHints(tenant, is_released=True), self._clock())

    # --- keys ------------------------------------------------------------------------------

    def _keys_of(self, name: BlockName) -> list[str]:
        """Return the keys of a block. The store is asked for those of an unknown one."""
        if self.holds(name):
            return [self._key_of(name)]
        first = f"{self._blocks}{name.hex()}"
        keys = []
        for page in self._objects.list(self._blocks, after=first[:-1]):
            keys += [info.key for info in page if _is_of(info, name)]
            if page[-1].key > f"{first}-~":  # after those of all tenants
                break
        return keys

    def _key_of(self, name: BlockName) -> str:
        with self._lock:
            return self._blocks + stem_of(name, self.order.tenant_of(name))

    def _valid_digest(self, content: memoryview, name: BlockName) -> bytes | None:
        if len(content) != self._object_bytes:
            return None
        digest = digest_in_header(content[:HEADER_BYTES], name, self._block_bytes)
        is_valid = digest is not None and xxh3_128_digest(content[HEADER_BYTES:]) == digest
        return digest if is_valid else None


def _is_of(info: ObjectInfo, name: BlockName) -> bool:
    with suppress(ValueError):  # not ours
        return block_of(info.key.rpartition("/")[2])[0] == name
    return False


def _copy_out(content: memoryview, memory: BlockMemory, block: int) -> None:
    """Copy bytes into a block. Other Python threads run meanwhile."""
    source: int = np.frombuffer(content, np.uint8).ctypes.data
    ctypes.memmove(memory.address_of(block), source, len(content))
