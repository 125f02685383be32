"""NIXL over UCX: P writes one-sidedly into D's memory. The only module that imports nixl.

No progress thread: it would burn a core. UCX moves bytes only inside `poll` (and `post`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kv_transfer.errors import PeerUnreachable, TransportMissing
from kv_transfer.messages import Region
from kv_transfer.transport import Arrived, ChannelEvent, Severed, Write, WriteFailed, Written
from kv_transfer.types import BlockId

_TICKET_BYTES = 8


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """UCX settings of this transport alone; an UCX_* variable of the environment goes first."""

    # What UCX may use. CMA is left out by default: with it P's kernel writes straight into
    # D's memory, and closing D's end would not keep a late write out.
    tls: str = "^cma"
    net_devices: str = ""  # such as "lo" or "eth0"; empty lets UCX choose
    device_is_direct: bool = False  # the device's own path (CUDA IPC) bypasses D as CMA does


class NixlTransport:
    """Makes a NIXL agent per pair: closing one cuts off one peer and leaves the rest alone."""

    name = "nixl"
    is_one_sided = True

    def __init__(self, region: Region, config: NixlConfig = NixlConfig()) -> None:
        self._nixl = _import_nixl()
        self._region = region
        self._config = config
        self._num_opened = 0

    @property
    def close_stops_writes(self) -> bool:
        is_direct = _excludes(os.environ.get("UCX_TLS", self._config.tls), "cma")
        return is_direct and not self._config.device_is_direct

    def open(self) -> NixlChannel:
        self._num_opened += 1
        return NixlChannel(self._nixl, self._region, self._config)

    def close(self) -> None:
        """Every channel has its own agent; nothing is shared."""


class NixlChannel:
    """One agent, one region, at most one peer."""

    def __init__(self, nixl: ModuleType, region: Region, config: NixlConfig) -> None:
        self._nixl = nixl
        self._region = region
        self._agent: Any = nixl.nixlAgent(os.urandom(12).hex(), _agent_config(nixl))
        self._agent.createBackend("UCX", _backend_parameters(config))
        self._registered = _registration(nixl, region)
        self._agent.registerMem(self._registered, [])
        self._metadata: bytes = self._agent.getLocalMD()
        self._peer: str | None = None
        self._local_list = 0
        self._remote_list = 0
        self._handle_by_write: dict[int, int] = {}
        self._failures: list[ChannelEvent] = []

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        try:
            self._peer = str(self._agent.loadRemoteMD(metadata), "ascii")
            self._local_list = self._prepare(self._nixl.NIXL_INIT_AGENT, self._region)
            self._remote_list = self._prepare(self._peer, region)
        except _errors(self._nixl) as error:
            raise PeerUnreachable(f"NIXL cannot reach the peer: {error!r}") from error

    def _prepare(self, agent_name: str, region: Region) -> int:
        """Describe every block once; a write then names them by index."""
        size = region.block_bytes
        strided = [[region.base, size, _device_number(region), size, region.num_blocks]]
        blocks = np.array(strided, dtype=np.uint64)
        kind = _memory_kind(self._nixl, region)
        return int(self._agent.prepXferDlist(agent_name, kind, blocks, []))

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        """Nothing to post: P needs no help to write."""

    def cancel(self, ticket: int) -> None:
        """Nothing to take back: P alone knows what is in flight."""

    def post(self, write: Write) -> None:
        sources = np.array(write.sources, dtype=np.int32)
        targets = np.array(write.targets, dtype=np.int32)
        try:
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_WRITE, self._local_list, sources, self._remote_list, targets
            )
            self._handle_by_write[write.write_id] = handle
            self._agent.postXferReq(handle, b"")
        except _errors(self._nixl) as error:
            self._failures.append(WriteFailed(write.write_id, f"post: {error!r}"))

    def notify(self, ticket: int) -> None:
        try:
            self._agent.genNotif(self._peer, ticket.to_bytes(_TICKET_BYTES, "big"))
        except _errors(self._nixl) as error:
            self._failures.append(Severed(f"notify: {error!r}"))

    def poll(self) -> list[ChannelEvent]:
        events, self._failures = self._failures, []
        for write_id in list(self._handle_by_write):
            ended = self._end_of(write_id)
            if ended is not None:
                events.append(ended)
        # Also what makes UCX move when no write of ours is in flight.
        for payloads in self._agent.getNotifs({}, []).values():
            events += [Arrived(int.from_bytes(payload, "big")) for payload in payloads]
        return events

    def _end_of(self, write_id: int) -> ChannelEvent | None:
        handle = self._handle_by_write[write_id]
        try:
            status = self._agent.getXferStatus(handle)
        except _errors(self._nixl) as error:
            del self._handle_by_write[write_id]
            return WriteFailed(write_id, repr(error))
        if status == self._nixl.NIXL_IN_PROG:
            return None
        del self._handle_by_write[write_id]
        if status != self._nixl.NIXL_SUCCESS:
            return WriteFailed(write_id, str(status))
        self._agent.releaseXferReq(handle)
        return Written(write_id)

    def close(self) -> None:
        self._handle_by_write.clear()
        self._agent = None
        self._registered = None


def _import_nixl() -> ModuleType:
    """The bindings alone: the Python layer above them configures the process's logging."""
    raises = logging.raiseExceptions
    try:
        import nixl._bindings as bindings
    except ImportError as error:
        raise TransportMissing(
            "the nixl transport needs the package nixl: pip install 'nixl>=1.5,<1.6'"
        ) from error
    finally:
        logging.raiseExceptions = raises
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return bindings  # type: ignore[no-any-return]


def _errors(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """Every error that NIXL itself raises; anything else is a bug of ours."""
    return tuple(
        value
        for name, value in vars(nixl).items()
        if name.startswith("nixl") and name.endswith("Error")
    )


def _agent_config(nixl: ModuleType) -> Any:
    config = nixl.nixlAgentConfig()
    config.useProgThread = False
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    return config


def _backend_parameters(config: NixlConfig) -> dict[str, str]:
    settings = [("TLS", config.tls), ("NET_DEVICES", config.net_devices)]
    chosen = ",".join(f"{name}={value}" for name, value in settings if value)
    return {"engine_config": chosen} if chosen else {}


def _registration(nixl: ModuleType, region: Region) -> Any:
    entry = (region.base, region.num_bytes, _device_number(region), "")
    return nixl.nixlRegDList(_memory_kind(nixl, region), [entry])


def _memory_kind(nixl: ModuleType, region: Region) -> Any:
    return nixl.DRAM_SEG if region.device == "cpu" else nixl.VRAM_SEG


def _device_number(region: Region) -> int:
    return int(region.device.partition(":")[2] or 0)


def _excludes(tls: str, name: str) -> bool:
    """Whether a UCX_TLS value keeps this transport out."""
    is_negated, names = tls.startswith("^"), set(tls.lstrip("^").split(","))
    if is_negated:
        return name in names
    return not names & {name, "all", "sm", "shm"} and bool(tls)
