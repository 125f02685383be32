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
from functools import partial

import numpy as np
from xxhash import xxh3_128_digest

from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, Tenant
from baton.kv_transfer.external_kv import OBJECT
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.tiers.stores.block_store import BlockStore, StoreKind
from baton.kv_transfer.tiers.stores.objects.journal_objects import CLEARED, JournalObjects
from baton.kv_transfer.tiers.stores.objects.objects import ObjectInfo, Objects, open_bucket
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
RECENT_S = 60.0  # since a write: a removal that is read so soon after it may be older

_Victim = tuple[BlockName, Tenant]


class ObjectStore(BlockStore):
    """Several threads may read and write at a time."""

    def __init__(
        self,
        objects: Objects,
        fingerprint: str,
        block_bytes: int,
        max_bytes: int,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("kv-object-store-size", block_bytes, max_bytes, tenant_share, clock)
        self._objects = objects
        namespace = namespace_of(fingerprint)
        self._blocks = f"{namespace}/blocks/"
        self._journals = JournalObjects(objects, f"{namespace}/journals/", clock)
        self._pages: Iterator[list[ObjectInfo]] | None = None  # while names are listed
        self._found: list[tuple[float, BlockName, Tenant]] = []
        self._is_cleared = False  # by another process; not listed since
        self._written_s: dict[BlockName, float] = {}  # times of recent writes, the oldest first

    # --- blocks ----------------------------------------------------------------------------

    def read(self, name: BlockName, memory: BlockMemory, block: int) -> bytes | None:
        """Read a block and return its digest; None if there is no valid one.

        Nothing is written to the memory after the call, nor before the digest is verified.
        """
        try:
            content = self._objects.get(self._key_of(name), self.stored_bytes)
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
        is_full = partial(self.order.is_full_for, hints.tenant)
        self._evict(self._take_victims(hints.tenant, is_full))
        stem = stem_of(name, hints.tenant)
        header = pack_header(name, digest, self._block_bytes)
        self._objects.put(self._blocks + stem, (header, memory.view(block)))
        self._journals.note(WRITTEN, stem)
        with self._lock:
            self.order.add(name, hints, self._clock())
            self._note_written(name)

    def use(self, names: Iterable[BlockName], hints: BlockHints) -> None:
        """Uses and hints are forgotten at a restart."""
        with self._lock:
            for name in names:
                self.order.use(name, hints, self._clock())

    def remove(self, name: BlockName) -> None:
        self._objects.delete(self._keys_of(name))
        self._forget(name)  # not before its object is gone: what fails is repeated
        self._journals.note(REMOVED, name.hex())

    def clear(self) -> None:
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
            if sign == CLEARED:
                self._is_cleared = True
            else:
                self._apply_unless_outdated(sign, stem)
        if self._is_cleared:
            self._list_again()
        order = self.order
        self._evict(self._take_victims(SHARED, lambda: len(order) > order.max_blocks))

    def _apply_unless_outdated(self, sign: str, stem: str) -> None:
        """Apply a change by another process, unless it removed what has been written again since.

        Journals are read one after the other, and published after the changes.
        """
        with suppress(ValueError):  # not ours
            name, _ = block_of(stem)
            if sign == REMOVED and name in self._written_s and self._is_stored(name):
                return
            self._apply_change(sign, stem)
            if sign == WRITTEN:
                with self._lock:
                    self._note_written(name)

    def _note_written(self, name: BlockName) -> None:
        now_s = self._clock()
        self._written_s.pop(name, None)
        self._written_s[name] = now_s
        while self._written_s[oldest := next(iter(self._written_s))] < now_s - RECENT_S:
            del self._written_s[oldest]

    def _is_stored(self, name: BlockName) -> bool:
        try:
            self._objects.get(self._key_of(name), 0)  # reads no bytes
        except FileNotFoundError:
            return False
        except OSError:
            return True  # or the next read shows that it is not
        return True

    def _list_again(self) -> None:
        """Forget what another process has cleared. What was written since is known or listed."""
        self._pages, self._found = None, []  # a scan begins again
        pages = self._objects.list(self._blocks)
        found = [block for page in pages for block in self._blocks_in(page)]
        for name in set(self.order.names).difference(name for _, name, _ in found):
            self._forget(name)
        self._learn(sorted(found))
        self._is_cleared = False

    def close(self) -> None:
        """Publish the last changes. The journal is deleted by others once it is old."""
        self._journals.publish()

    def _blocks_in(self, page: Iterable[ObjectInfo]) -> Iterator[tuple[float, BlockName, Tenant]]:
        for info in page:
            with suppress(ValueError):  # not ours
                name, tenant = block_of(info.key.rpartition("/")[2])
                if info.num_bytes == self.stored_bytes:
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

    # --- eviction --------------------------------------------------------------------------

    def _take_victims(self, tenant: Tenant, is_over: Callable[[], bool]) -> list[_Victim]:
        """Forget blocks while there are too many, as many as are deleted at a time."""
        victims: list[_Victim] = []
        with self._lock:
            while is_over() and len(victims) < DELETE_OBJECTS:
                name = next(self.order.victims(tenant, self._clock()), None)
                if name is None:
                    break
                victims.append((name, self.order.tenant_of(name)))
                self.order.remove(name)
        return victims

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
            self.order.num_evicted += len(victims)

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
        if len(content) != self.stored_bytes:
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


def _open_store(
    url: str, fingerprint: str, block_bytes: int, max_bytes: int, tenant_share: float
) -> ObjectStore:
    return ObjectStore(open_bucket(url), fingerprint, block_bytes, max_bytes, tenant_share)


OBJECTS = StoreKind(
    OBJECT,
    _open_store,
    open_bucket,
    remedy="nodes work without it; check the bucket, and AWS_* in the environment",
    bytes_per_s=2e8,
    refresh_s=1.0,
    num_parallel=8,
    max_waiting_share=0.5,
)
