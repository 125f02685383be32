"""Files and objects of the tiers of all nodes, and their faults."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Event

from benchmarks.chaos.faults import FaultKind
from benchmarks.chaos.s3_server import BUCKET, S3Server, environment_for, s3_server

SILENCE_S = 60.0  # longer than any fault
HALF = 0.5
MAX_OBJECTS = 512  # the process of the benchmark holds them


class TierStorage:
    def __init__(self, folder: Path, folder_size: str, server: S3Server) -> None:
        self._folder = folder
        self._folder_size = folder_size
        self._server = server
        self._draw = random.Random(0)

    @property
    def arguments(self) -> tuple[str, ...]:
        return (
            f"--kv-folder={self._folder}",
            f"--kv-folder-size={self._folder_size}",
            f"--kv-object-store=s3://{BUCKET}/kv",
        )

    @property
    def port(self) -> int:
        """The port of the object store."""
        return self._server.port

    @property
    def environment(self) -> dict[str, str]:
        return environment_for(self._server)

    def damage(self, kind: FaultKind) -> int:
        """Change half of the blocks, or delete all. Return their number."""
        num_damaged = 0
        for path in self._folder.glob("*/??/*.kv"):
            with suppress(OSError):  # evicted meanwhile
                num_damaged += self._damage_file(path, kind)
        with self._server.lock:
            for key, content in list(self._server.objects.items()):
                if "/blocks/" in key and (changed := self._changed(content, kind)) is not None:
                    self._server.objects[key] = changed
                    num_damaged += 1
                elif "/blocks/" in key and kind is FaultKind.EMPTY:
                    del self._server.objects[key]
                    num_damaged += 1
        return num_damaged

    def _damage_file(self, path: Path, kind: FaultKind) -> bool:
        if kind is FaultKind.EMPTY:
            path.unlink()
            return True
        changed = self._changed(path.read_bytes(), kind)
        if changed is None:
            return False
        with path.open("r+b") as file:  # in place: others may be reading it
            file.write(changed)
            file.truncate()
        return True

    def _changed(self, content: bytes, kind: FaultKind) -> bytes | None:
        """Return changed content of a block, or None to keep it."""
        if kind is FaultKind.EMPTY or not content or self._draw.random() > HALF:
            return None
        place = self._draw.randrange(len(content))
        if kind is FaultKind.TRUNCATE:
            return content[:place]
        return content[:place] + bytes((content[place] ^ 0x55,)) + content[place + 1 :]

    def disturbed(self, kind: FaultKind) -> AbstractContextManager[None]:
        """Return the context in which a lasting fault is in effect."""
        match kind:
            case FaultKind.BLOCK:
                return self._blocked()
            case FaultKind.DOWN:
                return self._down()
            case _:
                return self._silent()

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        """Put a file in the place of the folder until the block ends."""
        kept = self._folder.with_suffix(".kept")
        self._folder.rename(kept)
        while not self._put_file():  # a node has created the folder again
            shutil.rmtree(self._folder)
        try:
            yield
        finally:
            self._folder.unlink()
            kept.rename(self._folder)

    def _put_file(self) -> bool:
        try:
            self._folder.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @contextmanager
    def _down(self) -> Iterator[None]:
        def refuse(_: str) -> None:
            raise ConnectionResetError

        self._server.before = refuse
        try:
            yield
        finally:
            self._server.before = _serve

    @contextmanager
    def _silent(self) -> Iterator[None]:
        is_over = Event()

        def wait(_: str) -> None:
            is_over.wait(SILENCE_S)

        self._server.before = wait
        try:
            yield
        finally:
            self._server.before = _serve
            is_over.set()


def _serve(_: str) -> None:
    pass


@contextmanager
def tier_storage(folder: Path, folder_size: str) -> Iterator[TierStorage]:
    with s3_server(max_objects=MAX_OBJECTS) as server:
        yield TierStorage(folder / "kv", folder_size, server)
        shutil.rmtree(folder / "kv", ignore_errors=True)
