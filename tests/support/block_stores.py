"""Block stores for tests: files, objects in memory, and objects on a small S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from benchmarks.chaos.s3_server import BUCKET, S3Server
from kv_transfer.tiers.block_header import HEADER_BYTES
from kv_transfer.tiers.block_store import BlockStore
from kv_transfer.tiers.file_tier import FileTier
from kv_transfer.tiers.object_tier import ObjectTier
from kv_transfer.tiers.objects import Objects
from kv_transfer.tiers.s3 import open_bucket
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


class FolderWorld:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(
        self, fingerprint: str = MODEL, max_bytes: int = LIMIT, tenant_share: float = 1.0
    ) -> BlockStore:
        return FileTier(str(self.folder), fingerprint, BLOCK_BYTES, max_bytes, tenant_share)

    def stored(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*/??/*.kv")}

    def read(self, number: int) -> bytes:
        return self._path(number).read_bytes()

    def write(self, number: int, content: bytes) -> None:
        self._path(number).write_bytes(content)

    def delete(self, number: int) -> None:
        self._path(number).unlink()

    def _path(self, number: int) -> Path:
        (path,) = self.folder.glob(f"*/??/{name_of(number).hex()}.kv")
        return path


class ObjectWorld:
    """Objects in a dictionary: that of a MemoryObjects, or of an S3 server."""

    def __init__(self, objects: Objects, content: dict[str, bytes]) -> None:
        self.objects = objects
        self.content = content
        self.now_s = 2000.0

    def open(
        self, fingerprint: str = MODEL, max_bytes: int = LIMIT, tenant_share: float = 1.0
    ) -> BlockStore:
        return ObjectTier(
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

    def _key(self, number: int) -> str:
        (key,) = (key for key in self.content if key.endswith(f"/blocks/{name_of(number).hex()}"))
        return key


def memory_world() -> ObjectWorld:
    objects = MemoryObjects()
    return ObjectWorld(objects, objects.content)


def s3_world(server: S3Server) -> ObjectWorld:
    """Needs `point_environment_at`."""
    return ObjectWorld(open_bucket(f"s3://{BUCKET}/some/prefix"), server.objects)


def scan_all(store: BlockStore) -> BlockStore:
    while not store.scan():
        pass
    return store
