"""Header of a stored block: what its bytes are, and their digest."""

from __future__ import annotations

from struct import Struct

from baton.core.ids import BlockName
from baton.kv_transfer.tiers.block_memory import DIGEST_BYTES

_HEADER = Struct(f"<8sQ{DIGEST_BYTES}s32s")  # magic, bytes of the block, their digest, the name
_MAGIC = b"BATONKV1"
HEADER_BYTES = _HEADER.size


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
