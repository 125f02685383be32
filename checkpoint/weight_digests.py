"""Digests of the tensors of weight files, kept in the user's cache for the next start.

A digest covers every byte of its tensor. It is fast rather than cryptographic: weights that differ
by training or by accident have other digests, weights made to collide may have the same.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from baton.core.user_cache import user_cache_folder

MIN_CACHED_BYTES = 16 << 20  # smaller files are hashed in milliseconds
# A later change of a younger file might leave its times as they are, on file systems with coarse
# ones.
MIN_AGE_S = 2.0
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Properties that change if a file is replaced or written to. Nobody can set `ctime_ns`."""

    path: str
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        path = path.resolve()
        facts = path.stat()
        return cls(str(path), facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)

    @property
    def changed_s(self) -> float:
        return max(self.mtime_ns, self.ctime_ns) / 1e9


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes."""
    return xxh3_128_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True, eq=False)
class DigestCache:
    """Digests by tensor of weight files, one small file in `folder` for each weight file.

    Without a folder, or if it cannot be used, nothing is kept.
    """

    folder: Path | None
    clock: Callable[[], float] = time.time
    min_bytes: int = MIN_CACHED_BYTES

    def find(self, identity: FileIdentity, names: Collection[str]) -> dict[str, str]:
        """Return the digests of all tensors of a file, or nothing."""
        if self.folder is None:
            return {}
        try:
            kept = json.loads(self._path_of(self.folder, identity).read_text("utf-8"))
            digests = kept["digests"]
            is_this = kept["identity"] == asdict(identity) and digests.keys() == set(names)
            is_valid = is_this and all(map(_DIGEST.fullmatch, digests.values()))
            return dict(digests) if is_valid else {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}  # there is none, or it is damaged

    def keep(self, identity: FileIdentity, digests: Mapping[str, str]) -> None:
        is_old_enough = self.clock() - identity.changed_s >= MIN_AGE_S
        if self.folder is None or identity.num_bytes < self.min_bytes or not is_old_enough:
            return
        path = self._path_of(self.folder, identity)
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        text = json.dumps({"identity": asdict(identity), "digests": dict(digests)})
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                part.write_text(text, "utf-8")
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)

    def _path_of(self, folder: Path, identity: FileIdentity) -> Path:
        return folder / f"{blake2b(os.fsencode(identity.path), digest_size=16).hexdigest()}.json"


def user_digest_cache() -> DigestCache:
    """Return the cache of this user. A user without a home has none."""
    folder = user_cache_folder()
    return DigestCache(None if folder is None else folder / "weights")
