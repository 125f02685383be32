"""Block stores for tests: files, objects in memory, and objects on a small S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from baton.kv_transfer.tiers.stores.block_store import BlockStore
from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.objects.object_store import ObjectStore
from baton.kv_transfer.tiers.stores.objects.objects import Objects, open_bucket
from baton.kv_transfer.tiers.stores.stored_blocks import HEADER_BYTES
from benchmarks.chaos.s3_server import BUCKET, S3Server
from tests.support.memory_objects import MemoryObjects
from tests.support.tier_memory import BLOCK_BYTES, name_of

LIMIT = 1 << 20
STORED_BYTES = BLOCK_BYTES + HEADER_BYTES
MODEL = "model"


class StoreWorld(Protocol):
    """A place in which blocks are stored, as seen from outside."""

    def open(
        self, fingerprint: str = MODEL, max_bytes: int = LIMIT, tenant_share: float = 1.0
    ) -> BlockStore: ...

    def stored(self) -> set[str]:
        """Return the names of the blocks, of all models."""
        ...

    def read(self, number: int) -> bytes: ...

    def write(self, number: int, content: bytes) -> None: ...

    def delete(self, number: int) -> None: ...

    def without_deletes(self) -> AbstractContextManager[None]:
        """Return a context in which no block of those that are there can be deleted."""
        ...


class FolderWorld:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(
        self, fingerprint: str = MODEL, max_bytes: int = LIMIT, tenant_share: float = 1.0
    ) -> BlockStore:
        return FileStore(str(self.folder), fingerprint, BLOCK_BYTES, max_bytes, tenant_share)

    def stored(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*/??/*.kv")}

    def read(self, number: int) -> bytes:
        return self._path(number).read_bytes()

    def write(self, number: int, content: bytes) -> None:
        self._path(number).write_bytes(content)

    def delete(self, number: int) -> None:
        self._path(number).unlink()

    @contextmanager
    def without_deletes(self) -> Iterator[None]:
        """Put a folder in the place of each block."""
        kept = {path: path.with_suffix(".kept") for path in self.folder.glob("*/??/*.kv")}
        for path, aside in kept.items():
            path.rename(aside)
            path.mkdir()
        yield
        for path, aside in kept.items():
            path.rmdir()
            aside.rename(path)

    def _path(self, number: int) -> Path:
        (path,) = (
            path
            for path in self.folder.glob("*/??/*.kv")
            if path.stem.partition("-")[0] == name_of(number).hex()
        )
        return path


class ObjectWorld:
    """Objects in a dictionary of a server."""

    def __init__(
        self, objects: Objects, content: dict[str, bytes], server: MemoryObjects | S3Server
    ) -> None:
        self.objects = objects
        self.content = content
        self.server = server
        self.now_s = 2000.0

    def open(
        self, fingerprint: str = MODEL, max_bytes: int = LIMIT, tenant_share: float = 1.0
    ) -> BlockStore:
        return ObjectStore(
            self.objects, fingerprint, BLOCK_BYTES, max_bytes, tenant_share, lambda: self.now_s
        )

    def stored(self) -> set[str]:
        return {key.rpartition("/")[2] for key in self.content if "/blocks/" in key}

    def read(self, number: int) -> bytes:
        return self.content[self._key(number)]

    def write(self, number: int, content: bytes) -> None:
        self.content[self._key(number)] = content

    def delete(self, number: int) -> None:
        del self.content[self._key(number)]

    @contextmanager
    def without_deletes(self) -> Iterator[None]:
        def refuse(operation: str) -> None:
            if operation in ("delete", "DELETE", "POST"):
                raise OSError("refused")

        before, self.server.before = self.server.before, refuse
        yield
        self.server.before = before

    def _key(self, number: int) -> str:
        (key,) = (
            key
            for key in self.content
            if key.partition("/blocks/")[2].partition("-")[0] == name_of(number).hex()
        )
        return key


def memory_world() -> ObjectWorld:
    objects = MemoryObjects()
    return ObjectWorld(objects, objects.content, objects)


def s3_world(server: S3Server) -> ObjectWorld:
    """Needs `point_environment_at`."""
    return ObjectWorld(open_bucket(f"s3://{BUCKET}/some/prefix"), server.objects, server)


def scan_all(store: BlockStore) -> BlockStore:
    while not store.scan():
        pass
    return store
