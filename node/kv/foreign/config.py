"""Settings of the foreign servers that a node reads KV from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from baton.core.errors import InvalidConfig
from baton.core.options import KV_CACHE, Option
from baton.kv_transfer.layout import KvPacking

SCHEME = "vllm"
LEASE_S = 30.0  # vLLM's kv_lease_duration
VERSION = "0.32.0"
MAX_SOURCES = 64
PACKINGS = {"plain": KvPacking.VLLM, "vec": KvPacking.VLLM_VEC, "amx": KvPacking.VLLM_AMX}


@dataclass(frozen=True, slots=True)
class ForeignSource:
    """A vLLM server that a node may dial."""

    host: str
    port: int
    model: str = ""  # as the server was started with it; empty in a URL: as the node was
    packing: KvPacking | None = None  # None: plain, and a server on a CPU is refused
    version: str = VERSION  # of vLLM
    lease_s: float = LEASE_S  # for which the server holds the KV of a prompt

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def parse_sources(written: str) -> tuple[ForeignSource, ...]:
    """Parse comma-separated URLs, vllm://host:port?packing=vec. Raises InvalidConfig."""
    sources = tuple(_parse_source(url.strip()) for url in written.split(",") if url.strip())
    if len(sources) > MAX_SOURCES:
        raise InvalidConfig(f"--kv-sources names {len(sources)}; the limit is {MAX_SOURCES}")
    if len({source.address for source in sources}) != len(sources):
        raise InvalidConfig("--kv-sources names a server twice")
    return sources


def _parse_source(url: str) -> ForeignSource:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != SCHEME or not host or not port or parts.path.strip("/") or parts.fragment:
        raise InvalidConfig(
            f"--kv-sources {url}: write {SCHEME}://HOST:PORT, the address of the "
            "server's NIXL side channel (VLLM_NIXL_SIDE_CHANNEL_PORT)"
        )
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = given.keys() - {"model", "packing", "version", "lease"}
    if unknown:
        raise InvalidConfig(
            f"--kv-sources {url}: {', '.join(sorted(unknown))} is unknown; there are model, "
            "packing, version and lease"
        )
    return ForeignSource(
        host,
        port,
        given.get("model", ""),
        _packing(url, given.get("packing")),
        given.get("version", VERSION),
        _lease_s(url, given.get("lease")),
    )


def _packing(url: str, name: str | None) -> KvPacking | None:
    if name is not None and name not in PACKINGS:
        names = ", ".join(PACKINGS)
        raise InvalidConfig(f"--kv-sources {url}: packing must be one of {names}")
    return None if name is None else PACKINGS[name]


def _lease_s(url: str, written: str | None) -> float:
    try:
        lease_s = LEASE_S if written is None else float(written)
    except ValueError:
        lease_s = 0.0
    if not 1 <= lease_s <= 3600:
        raise InvalidConfig(f"--kv-sources {url}: lease must be from 1 to 3600 seconds")
    return lease_s


@dataclass(frozen=True, slots=True)
class KvSourcesConfig:
    """Servers whose KV a node reads."""

    option = "--kv-sources"

    servers: Annotated[
        tuple[ForeignSource, ...],
        Option(
            "vLLM servers (NixlConnector) whose KV requests may name in kv_transfer_params, "
            "comma-separated: vllm://HOST:PORT of the side channel, with ?packing=vec or amx for a "
            "server on a CPU, and &model=, &version=, &lease= where they differ. Default: none.",
            KV_CACHE,
            name="kv_sources",
            default="",
            parse=parse_sources,
        ),
    ] = ()

    @property
    def is_on(self) -> bool:
        return bool(self.servers)

    def check_shared(self) -> None:
        """Any number of nodes can read from a server."""
