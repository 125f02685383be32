"""KV blocks in files of a folder, which several processes may share and which survives them.

A block is one file, named after the block. It is written under another name and then renamed, so
a reader finds a whole file or none. Nothing is flushed to the disk: after a power failure a file
may be torn, which its digest shows, and then it is a miss. Each process learns of the others' files
from the journals that they write.

What must survive a restart is in the metadata of the file: its name has the digest of the tenant,
its modification time (`BlockTime`) the last use, the end of the retention and the priority.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from errno import EDQUOT, ENOSPC
from pathlib import Path

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, Tenant
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.tiers.stores.block_file import BlockTime, can_read, read_block, write_block
from baton.kv_transfer.tiers.stores.block_store import BlockStore, BlockUnusable
from baton.kv_transfer.tiers.stores.folder_checks import (
    FOLDER_MODE,
    check_blocks_owner,
    check_folder_owner,
    make_private,
)
from baton.kv_transfer.tiers.stores.journal_files import JournalFiles
from baton.kv_transfer.tiers.stores.other_namespaces import (
    JOURNALS,
    PART_SUFFIX,
    PREFIX_CHARS,
    SUFFIX,
    OtherNamespaces,
)
from baton.kv_transfer.tiers.stores.stored_blocks import (
    REMOVED,
    WRITTEN,
    block_of,
    namespace_of,
    stem_of,
)

DISK_FULL = (ENOSPC, EDQUOT)
NUM_PROBES = 8  # other files that are tried after one that cannot be read
MAX_WRITES = 8  # of a block, while the disk is full: before each one but the first, room is made
PART_AGE_S = 3600.0  # of what processes left that were killed while they wrote a block


class FileStore(BlockStore):
    """One thread uses it; `holds` may be called from any."""

    def __init__(
        self,
        folder: str,
        fingerprint: str,
        block_bytes: int,
        max_bytes: int,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.time,  # other processes and restarts know no other
    ) -> None:
        """Raises InvalidConfig if others can replace the folder.

        One that does not work yet is no error: `scan` tries it again.
        """
        super().__init__("kv-folder-size", block_bytes, max_bytes, tenant_share, clock)
        self._folder = Path(folder).expanduser() / namespace_of(fingerprint)
        self._journals = JournalFiles(self._folder / JOURNALS, clock)
        self._max_bytes = max_bytes
        self._others = OtherNamespaces(self._folder, self._journals.now)
        self._is_open = False
        with suppress(OSError):
            self._open()

    def scan(self) -> bool:
        """Find the files that are there, in the order of their last use."""
        self._must_be_open()
        found: list[tuple[float, BlockName, BlockHints]] = []
        now = self._clock()
        for path, name, tenant in self._files():
            with suppress(FileNotFoundError):  # deleted by another process
                found.append((path.stat().st_mtime, name, self._kept_hints(path, tenant, now)))
        for name in set(self.order.names).difference(name for _, name, _ in found):
            self.order.remove(name)
        for _, name, hints in sorted(found, key=lambda each: each[:2]):
            if name not in self.order:
                self._add(name, hints, now)
        self._others.list_all()
        self._delete_old_parts()
        return True

    def refresh(self) -> None:
        self._must_be_open()
        self._make_folder()  # someone may have emptied the folder
        if self._journals.is_behind:
            self._journals.skip()
            self.scan()
        for sign, stem in self._journals.read():
            # Journals are read one after the other: it may have been written again since.
            if sign == WRITTEN or not self._file(stem).exists():
                self._apply_change(sign, stem)
        self._others.list_some(self._clock())
        with suppress(OSError):  # a folder that is full or read-only is still read
            self._journals.keep()
        self._make_room(0, SHARED, self._clock())  # for what others have written

    def read(self, name: BlockName, memory: BlockMemory, block: int) -> bytes | None:
        path = self._path_of(name)
        try:
            digest, kept = read_block(path, name, memory, block)
        except FileNotFoundError:
            self._forget(name)
            return None
        except OSError as error:
            self._forget(name)  # so that one bad file fails only once
            if not self._can_read_others():  # it is the folder
                raise
            raise BlockUnusable(*error.args, str(path)) from error
        if digest is None:
            self._remove_damaged(name)
            return None
        self.order.touch(name)
        self._set_time(path, BlockTime(max(kept.used_s, self._clock()), kept.priority))
        return digest

    def write(
        self,
        name: BlockName,
        memory: BlockMemory,
        block: int,
        digest: bytes,
        hints: BlockHints = NO_HINTS,
    ) -> None:
        """Write a block, unless its file is there. Others are evicted while the disk is full.

        Raises OSError if that fails.
        """
        self._must_be_open()
        for num_left in reversed(range(MAX_WRITES)):
            try:
                self._write(name, memory, block, digest, hints)
                return
            except OSError as error:
                may_repeat = error.errno in DISK_FULL and num_left
                if not (may_repeat and self._free_space(hints.tenant, self._clock())):
                    raise

    def use(self, names: Iterable[BlockName], hints: BlockHints) -> None:
        """A use without hints is forgotten at a restart: it costs no system call."""
        now = self._clock()
        for name in names:
            self.order.use(name, hints, now)
            self._keep_hints(name, hints, now)

    def remove(self, name: BlockName) -> None:
        self._must_be_open()
        for path, found, _ in self._files_in(self._path_of(name).parent):
            if found == name:
                path.unlink(missing_ok=True)
        self.order.remove(name)  # not before its file is gone: what fails is repeated
        self._journals.note(REMOVED, name.hex())

    def clear(self) -> None:
        self.refresh()
        for path, name, _ in self._files():
            self._delete(name, path)
        self._forget_all()

    def close(self) -> None:
        """Leave the journal to those who have not read its end. It is deleted once it is old."""

    def _can_read_others(self) -> bool:
        """Return whether any of a sample of the other files can be read; True if there is none."""
        names = self.order.names
        sample = names[:: len(names) // NUM_PROBES + 1]
        return not sample or any(can_read(self._path_of(name)) for name in sample)

    def _must_be_open(self) -> None:
        """Open the folder if that has failed so far. Raises OSError if it fails again."""
        try:
            self._open()
        except InvalidConfig as error:  # at the start this ends the node; now it only has no files
            raise PermissionError(str(error)) from error

    def _open(self) -> None:
        """Make the folder, and begin the journal.

        Raises InvalidConfig if others can replace the folder. Nothing is written to it then.
        """
        if self._is_open:
            return
        self._make_folder()
        check_folder_owner(self._folder.parent)
        check_blocks_owner(self._folder.parent, self._folder)
        self._journals.open()
        self._is_open = True

    def _make_folder(self) -> None:
        make_private(self._folder.parent)
        self._folder.mkdir(mode=FOLDER_MODE, exist_ok=True)

    def _write(
        self, name: BlockName, memory: BlockMemory, block: int, digest: bytes, hints: BlockHints
    ) -> None:
        path = self._path(name, hints.tenant)
        now = self._clock()
        is_there = path.exists()
        if not is_there:
            self._make_room(1, hints.tenant, now)
            self._make_subfolder(path.parent)
            part = path.with_name(f"{self._journals.process}{PART_SUFFIX}")
            write_block(path, part, name, memory, block, digest)
        self._add(name, hints, now)
        self._keep_hints(name, hints, now)
        if not is_there:
            self._journals.note(WRITTEN, path.stem)

    def _make_subfolder(self, path: Path) -> None:
        try:
            path.mkdir(exist_ok=True)
        except FileExistsError as error:  # not ours
            raise BlockUnusable(*error.args, str(path)) from error

    def _delete_old_parts(self) -> None:
        oldest_s = time.time() - PART_AGE_S
        for path in self._folder.glob(f"??/*{PART_SUFFIX}"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest_s:
                    path.unlink()

    @property
    def _num_allowed(self) -> int:
        """The number of blocks for which there is room: at least its share of the folder.

        Processes of other namespaces delete their own blocks, those of unused ones are deleted.
        """
        fair_bytes = self._max_bytes // (1 + self._others.num_used)
        max_bytes = max(fair_bytes, self._max_bytes - self._others.used_bytes)
        return max(1, max_bytes // self.stored_bytes)

    def _add(self, name: BlockName, hints: BlockHints, now: float) -> None:
        """Add a block whose file is there."""
        if name not in self.order:
            self._make_room(1, hints.tenant, now)
        self.order.add(name, hints, now)

    def _make_room(self, num_new: int, tenant: Tenant, now: float) -> None:
        """Evict what is over the limits with `num_new` blocks of the tenant more: 0 or 1."""
        self._others.make_room(self._max_bytes - (len(self.order) + num_new) * self.stored_bytes)
        while len(self.order) + num_new > self._num_allowed or (
            num_new and self.order.is_full_for(tenant)
        ):
            if not self._evict(tenant, now):
                return

    def _free_space(self, tenant: Tenant, now: float) -> bool:
        """Delete a block, an unused one of another namespace if possible. False: none may be."""
        num_bytes = self._others.num_bytes
        self._others.make_room(num_bytes - 1)
        return self._others.num_bytes < num_bytes or self._evict(tenant, now)

    def _evict(self, tenant: Tenant, now: float) -> bool:
        name = self._next_victim(tenant, now)
        if name is None:
            return False
        self._delete(name, self._path_of(name))
        self.order.num_evicted += 1
        return True

    def _delete(self, name: BlockName, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.order.remove(name)  # not before its file is gone
        self._journals.note(REMOVED, path.stem)

    def _next_victim(self, tenant: Tenant, now: float) -> BlockName | None:
        """Return the block to evict, which no process retains or gave a higher priority."""
        while (name := next(self.order.victims(tenant, now), None)) is not None:
            if not self._learn_hints(name, now):
                return name
        return None

    def _learn_hints(self, name: BlockName, now: float) -> bool:
        """Apply the hints that other processes kept for a block. Returns whether it stays."""
        try:
            kept = self._kept_hints(self._path_of(name), self.order.tenant_of(name), now)
        except FileNotFoundError:
            return False
        known, num_retained = self.order.hints_of(name, now), self.order.num_retained
        is_raised = (kept.priority or 0) > (known.priority or 0) and not known.is_released
        if is_raised or kept.retain_s:
            self.order.use(name, kept if is_raised else replace(kept, priority=None), now)
        return is_raised or self.order.num_retained > num_retained

    def _kept_hints(self, path: Path, tenant: Tenant, now: float) -> BlockHints:
        """Return the hints that the time of a file keeps. Raises FileNotFoundError."""
        kept = BlockTime.from_ns(path.stat().st_mtime_ns)
        if not kept.used_s:
            return BlockHints(tenant, is_released=True)
        return BlockHints(tenant, max(0.0, kept.used_s - now), kept.priority)

    def _keep_hints(self, name: BlockName, hints: BlockHints, now: float) -> None:
        """Write what must survive a restart into the metadata of the file."""
        if hints.is_plain:
            return
        kept = self.order.hints_of(name, now)
        if hints.is_released:
            self._set_time(self._path_of(name), BlockTime(0.0))
        elif (hints.retain_s or hints.priority is not None) and kept.priority is not None:
            self._set_time(self._path_of(name), BlockTime(now + kept.retain_s, kept.priority))

    def _set_time(self, path: Path, time: BlockTime) -> None:
        with suppress(OSError):  # another process has deleted it, or the folder is read-only
            os.utime(path, ns=(time.to_ns(), time.to_ns()))

    def _files(self) -> Iterator[tuple[Path, BlockName, Tenant]]:
        """Return the files of blocks. Raises OSError if they cannot be listed."""
        for name in os.listdir(self._folder):
            if len(name) == PREFIX_CHARS:
                yield from self._files_in(self._folder / name)

    def _files_in(self, folder: Path) -> Iterator[tuple[Path, BlockName, Tenant]]:
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            with suppress(ValueError):  # not ours
                if name.endswith(SUFFIX):
                    yield folder / name, *block_of(name.removesuffix(SUFFIX))

    def _path_of(self, name: BlockName) -> Path:
        return self._path(name, self.order.tenant_of(name))

    def _path(self, name: BlockName, tenant: Tenant) -> Path:
        return self._file(stem_of(name, tenant))

    def _file(self, stem: str) -> Path:
        return self._folder / stem[:PREFIX_CHARS] / f"{stem}{SUFFIX}"
