"""Format of stored blocks: their names, and the header in front of their bytes.

It is the same in files and objects, and on all hosts.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

from baton.core.ids import BlockName
from baton.core.kv_hints import SHARED, Tenant
from baton.kv_transfer.tiers.kv_access import DIGEST_BYTES

_HEADER = Struct(f"<8sQ{DIGEST_BYTES}s32s")  # magic, bytes of the block, their digest, the name
_MAGIC = b"BATONKV1"
HEADER_BYTES = _HEADER.size
_NAMESPACE_BYTES = 16
WRITTEN, REMOVED = "+", "-"  # signs of changes in journals, each before the stem of a block


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
