"""Kinds of stores that a node may have behind host memory, the fastest one first."""

from __future__ import annotations

from baton.kv_transfer.external_kv import FILE
from baton.kv_transfer.tiers.stores.block_store import StoreKind
from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.folder_checks import check_folder
from baton.kv_transfer.tiers.stores.objects.object_store import OBJECTS

FILES = StoreKind(
    FILE,
    FileStore,
    check_folder,
    remedy="nodes write no KV there; choose another --kv-folder",
    bytes_per_s=1e9,
    refresh_s=0.1,
)
STORE_KINDS: tuple[StoreKind, ...] = (FILES, OBJECTS)
