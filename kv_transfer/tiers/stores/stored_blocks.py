"""Format of stored blocks: their names, and the header in front of their bytes.

It is the same in files and objects, and on all hosts.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from struct import Struct

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockName
from baton.core.kv_hints import SHARED, Tenant
from baton.kv_transfer.tiers.kv_access import DIGEST_BYTES

_HEADER = Struct(f"<8sQ{DIGEST_BYTES}s32s")  # magic, bytes of the block, their digest, the name
_MAGIC = b"BATONKV1"
HEADER_BYTES = _HEADER.size
_NAMESPACE_BYTES = 16
WRITTEN, REMOVED = "+", "-"  # signs of changes in journals, each before the stem of a block
FOLDER_MODE = 0o700  # prompts can be recovered from their KV
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def namespace_of(fingerprint: str) -> str:
    """Return a name for the blocks of one model and layout, the same on all hosts."""
    return blake2b(fingerprint.encode(), digest_size=_NAMESPACE_BYTES).hexdigest()


def stem_of(name: BlockName, tenant: Tenant) -> str:
    """Return the text by which a stored block is found."""
    return name.hex() if tenant == SHARED else f"{name.hex()}-{tenant.hex()}"


def block_of(stem: str) -> tuple[BlockName, Tenant]:
    """Return name and tenant of a stored block. Raises ValueError."""
    name, _, tenant = stem.partition("-")
    return bytes.fromhex(name), Tenant(bytes.fromhex(tenant))


def pack_header(name: BlockName, digest: bytes, block_bytes: int) -> bytes:
    return _HEADER.pack(_MAGIC, block_bytes, digest, _name_field(name))


def digest_in_header(
    header: bytes | bytearray | memoryview, name: BlockName, block_bytes: int
) -> bytes | None:
    """Return the digest, or None if this is not the header of the named block."""
    magic, num_bytes, digest, named = _HEADER.unpack(header)
    is_valid = (magic, num_bytes, named) == (_MAGIC, block_bytes, _name_field(name))
    return bytes(digest) if is_valid else None


def _name_field(name: BlockName) -> bytes:
    return name.ljust(32, b"\0")


def check_folder(folder: str) -> None:
    """Make the folder for the files of all models. Raises InvalidConfig if others can replace it.

    One that does not work is no error: a node starts without it, and uses it once it works.
    """
    path = Path(folder).expanduser()
    with suppress(OSError):
        make_private(path)
        check_folder_owner(path)


def make_private(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def check_folder_owner(folder: Path) -> None:
    """Raise InvalidConfig if other users can replace the KV folder, or folders in it."""
    whole = folder.resolve()
    for path in (whole, *whole.parents):
        is_exposed = path == whole or bool(path.parent.stat().st_mode & stat.S_IWOTH)
        if is_exposed and path.stat().st_uid not in (0, os.geteuid()):
            raise InvalidConfig(f"--kv-folder {folder}: {path} {_of_another(path)}")
    mode = whole.stat().st_mode
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        raise InvalidConfig(
            f"--kv-folder {folder}: other users may write to it; chmod go-w, or name a new folder "
            "in it"
        )


def check_blocks_owner(folder: Path, blocks: Path) -> None:
    """Raise InvalidConfig if other users can change the blocks of a KV folder."""
    facts = blocks.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS_WRITE:
        raise InvalidConfig(f"--kv-folder {folder}: {blocks} {_of_another(blocks)}")


def _of_another(path: Path) -> str:
    return f"belongs to, or may be changed by, user {path.stat().st_uid}: name a folder of your own"
