"""Settings of the tiers of KV below the KV cache of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from baton.core.errors import InvalidConfig
from baton.core.exclusions import Feature, check_exclusions
from baton.core.options import KV_CACHE, Option, check_options
from baton.core.units import AUTO, parse_bytes, parse_kv_memory
from baton.kv_transfer.external_kv import FILE, OBJECT


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Settings of the KV connector `tiers`."""

    host_bytes: Annotated[
        int | None,
        Option(
            "Host memory for KV that was evicted from the KV cache, such as 4GiB, for prompts "
            "with the same prefix; 0: none. auto: a share of what is free, or none on a GPU.",
            KV_CACHE,
            name="kv_host_memory",
            default=AUTO,
            parse=parse_kv_memory,
        ),
    ] = None
    folder: Annotated[
        str,
        Option(
            "Folder for KV in files, below --kv-host-memory. It survives restarts, and nodes of "
            "the same model can share it. Default: none.",
            KV_CACHE,
            name="kv_folder",
        ),
    ] = ""
    folder_bytes: Annotated[
        int,
        Option(
            "Limit of the files in --kv-folder, of all models and versions together; unused "
            "versions are deleted first, then the least recently used files.",
            KV_CACHE,
            name="kv_folder_size",
            default="10GiB",
            parse=parse_bytes,
            is_setting=True,
        ),
    ] = 10 << 30
    object_store: Annotated[
        str,
        Option(
            "Bucket for KV in an S3-compatible store, below --kv-host-memory and --kv-folder: "
            "s3://bucket/prefix. AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY say where it is. Needs pip install 'baton[s3]'. Default: none.",
            KV_CACHE,
            name="kv_object_store",
        ),
    ] = ""
    object_store_bytes: Annotated[
        int,
        Option(
            "Limit of the objects of one model in --kv-object-store; the least recently used "
            "ones are deleted.",
            KV_CACHE,
            name="kv_object_store_size",
            default="1TiB",
            parse=parse_bytes,
            is_setting=True,
        ),
    ] = 1 << 40
    tenant_share: Annotated[
        float,
        Option(
            "Share of --kv-host-memory and of kv-folder-size that the KV of one tenant (a cache "
            "salt, or the owner of a token and all its salts) can take. 1: no limit.",
            KV_CACHE,
            name="kv_tenant_share",
            above=0,
            at_most=1,
            is_setting=True,
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        check_options(self)
        check_exclusions(
            {
                Feature.NO_HOST_MEMORY_TIER: self.host_bytes == 0,
                Feature.BACKING_TIER: self.places,
            }
        )

    @property
    def places(self) -> Mapping[str, tuple[str, int]]:
        """Return the place and the size of each store, by the name of its tier."""
        named = {
            FILE: (self.folder, self.folder_bytes),
            OBJECT: (self.object_store, self.object_store_bytes),
        }
        return {tier: place for tier, place in named.items() if place[0]}


def parse_tiers(given: Mapping[str, Any]) -> TiersConfig:
    """Make the settings from those of a KV connector. Raises InvalidConfig."""
    try:
        return TiersConfig(**given)
    except TypeError as error:
        raise InvalidConfig(f"kv-connector-config of the tiers: {error}") from error
