"""NIXL over UCX: P writes one-sidedly into D's memory. The only module that imports nixl.

No progress thread: it would burn a core. UCX moves bytes only inside `poll` (and `post`).
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kv_transfer.errors import InvalidKvSetting, PeerUnreachable, TransportMissing
from kv_transfer.messages import Region
from kv_transfer.process_mark import ProcessMark, own_mark
from kv_transfer.transport import (
    Arrived,
    ChannelEvent,
    LayerRange,
    Severed,
    Write,
    WriteFailed,
    Written,
)
from kv_transfer.types import BlockId

_TICKET_BYTES = 8
_SEPARATOR = b"\0"


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """UCX settings for this transport alone. An UCX_* variable of the environment goes first."""

    # What UCX may use, such as "tcp" or "^cma"; empty lets it choose. Between processes of one
    # machine that is CMA: fast, but blocks fenced because of a stalled P stay so until P says
    # a word or dies. Without CMA, D frees them by closing its own end.
    tls: str = ""
    net_devices: str = ""  # such as "lo" or "eth0"; empty lets UCX choose

    def __post_init__(self) -> None:
        for name, value in (("tls", self.tls), ("net_devices", self.net_devices)):
            if "," in value:
                raise InvalidKvSetting(
                    f"{name}={value}: NIXL takes one item; set UCX_{name.upper()}"
                )


class NixlTransport:
    """Makes a NIXL agent per pair: closing one cuts off one peer and leaves the rest alone."""

    name = "nixl"
    is_one_sided = True

    def __init__(self, region: Region, config: NixlConfig = NixlConfig()) -> None:
        self._nixl = _import_nixl()
        self._region = region
        self._config = config
        # The first agent of a process takes half a second; no request shall wait for it.
        self.open().close()

    def open(self) -> NixlChannel:
        try:
            return NixlChannel(self._nixl, self._region, self._config)
        except _errors(self._nixl) as error:
            raise PeerUnreachable(f"NIXL cannot make an agent: {error!r}") from error

    def close(self) -> None:
        """Every channel has its own agent; nothing is shared."""


class NixlChannel:
    """One agent, one region, at most one peer."""

    def __init__(self, nixl: ModuleType, region: Region, config: NixlConfig) -> None:
        self._nixl = nixl
        self._errors = _errors(nixl)
        self._region = region
        self._mark = own_mark()
        self._agent: Any = nixl.nixlAgent(os.urandom(12).hex(), _agent_config(nixl))
        self._agent.createBackend("UCX", _backend_parameters(config))
        self._registered = _registration(nixl, region)
        self._agent.registerMem(self._registered, [])
        self._metadata: bytes = self._mark.to_bytes() + _SEPARATOR + self._agent.getLocalMD()
        self._peer_mark: ProcessMark | None = None
        self._peer_region: Region | None = None
        self._peer_metadata = b""
        tls = os.environ.get("UCX_TLS", config.tls)
        self._is_direct = _allows(tls, _direct_transports(region))
        self._path: _Path | None = None
        self._handle_by_write: dict[int, int] = {}
        self._failures: list[ChannelEvent] = []

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        """D never opens a path back to P, so the agent is told of the peer at the first post."""
        mark, separator, agent_metadata = metadata.partition(_SEPARATOR)
        if not separator:
            raise PeerUnreachable("the peer did not say how to reach it")
        try:
            self._peer_mark = ProcessMark.from_bytes(mark)
        except ValueError as error:
            raise PeerUnreachable("the peer does not say which process it is") from error
        self._peer_metadata, self._peer_region = agent_metadata, region

    @property
    def close_stops_writes(self) -> bool:
        is_near = self._peer_mark is not None and self._peer_mark.is_near(self._mark)
        return not (is_near and self._is_direct)

    def is_peer_gone(self) -> bool:
        mark = self._peer_mark
        return mark is not None and mark.is_near(self._mark) and mark.is_gone()

    def _connected(self) -> _Path:
        """Describe every block of both sides once; a write then names them by index."""
        if self._path is not None:
            return self._path
        if self._peer_region is None:
            raise PeerUnreachable("the peer is not known yet")
        name = self._agent.loadRemoteMD(self._peer_metadata)
        name = name.decode() if isinstance(name, bytes) else name
        local = self._prepare(self._nixl.NIXL_INIT_AGENT, self._region)
        self._path = _Path(name, {1: _Lists(local, self._prepare(name, self._peer_region))})
        return self._path

    def _lists(self, path: _Path, num_parts: int) -> _Lists:
        """Of blocks in so many parts; those of layers are made when the first is written."""
        found = path.lists_by_parts.get(num_parts)
        if found is None and self._peer_region is not None:
            found = path.lists_by_parts[num_parts] = _Lists(
                self._prepare(self._nixl.NIXL_INIT_AGENT, self._region, num_parts),
                self._prepare(path.peer, self._peer_region, num_parts),
            )
        if found is None:
            raise PeerUnreachable("the peer is not known yet")
        return found

    def _prepare(self, agent_name: str, region: Region, num_parts: int = 1) -> int:
        size, count = region.block_bytes // num_parts, region.num_blocks * num_parts
        strided = [[region.base, size, _device_number(region), size, count]]
        blocks = np.array(strided, dtype=np.uint64)
        kind = _memory_kind(self._nixl, region)
        return int(self._agent.prepXferDlist(agent_name, kind, blocks, []))

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        """Nothing to post: P needs no help to write."""

    def cancel(self, ticket: int) -> None:
        """Nothing to take back: P alone knows what is in flight."""

    def post(self, write: Write) -> None:
        sources, targets = (
            _places(write.sources, write.layers),
            _places(write.targets, write.layers),
        )
        try:
            path = self._connected()
            lists = self._lists(path, 1 if write.layers is None else write.layers.of)
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_WRITE, lists.local, sources, lists.remote, targets
            )
            self._handle_by_write[write.write_id] = handle
            self._agent.postXferReq(handle, b"")
        except self._errors as error:
            self._fail(write.write_id, f"post: {error!r}")

    def notify(self, ticket: int, note: bytes) -> None:
        try:
            payload = ticket.to_bytes(_TICKET_BYTES, "big") + note
            self._agent.genNotif(self._connected().peer, payload)
        except self._errors as error:
            self._failures.append(Severed(f"notify: {error!r}"))

    def poll(self) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        for write_id, handle in list(self._handle_by_write.items()):
            if self._has_landed(write_id, handle):
                events.append(Written(write_id))
        # Also what makes UCX move when no write of ours is in flight.
        for payloads in self._agent.getNotifs({}, []).values():
            events += [_arrived(payload) for payload in payloads]
        failures, self._failures = self._failures, []
        return events + failures

    def _has_landed(self, write_id: int, handle: int) -> bool:
        try:
            status = self._agent.getXferStatus(handle)
        except self._errors as error:
            self._fail(write_id, repr(error))
            return False
        if status == self._nixl.NIXL_IN_PROG:
            return False
        if status != self._nixl.NIXL_SUCCESS:
            self._fail(write_id, str(status))
            return False
        del self._handle_by_write[write_id]
        self._agent.releaseXferReq(handle)
        return True

    def _fail(self, write_id: int, reason: str) -> None:
        self._failures.append(WriteFailed(write_id, reason))
        handle = self._handle_by_write.pop(write_id, None)
        if handle is not None:
            self._release(handle)

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except self._errors:
            return  # still in flight: the end of the agent takes it along

    def close(self) -> None:
        """From here on this process neither writes to the peer nor is written to through UCX."""
        if self._agent is None:
            return
        for handle in self._handle_by_write.values():
            self._release(handle)
        self._handle_by_write.clear()
        if self._path is not None:
            for lists in self._path.lists_by_parts.values():
                self._agent.releasedDlistH(lists.local)
                self._agent.releasedDlistH(lists.remote)
            self._agent.invalidateRemoteMD(self._path.peer)
        self._agent.deregisterMem(self._registered, [])
        self._agent = None


@dataclass(frozen=True, slots=True)
class _Path:
    """What the agent knows the peer by."""

    peer: str
    lists_by_parts: dict[int, _Lists]


@dataclass(frozen=True, slots=True)
class _Lists:
    """Every block, or part of one, of both sides, prepared."""

    local: int
    remote: int


def _arrived(payload: bytes) -> Arrived:
    return Arrived(int.from_bytes(payload[:_TICKET_BYTES], "big"), payload[_TICKET_BYTES:])


def _places(block_ids: tuple[BlockId, ...], layers: LayerRange | None) -> Any:
    """Where the parts of these blocks stand in a prepared list."""
    blocks = np.array(block_ids, dtype=np.int32)
    if layers is None:
        return blocks
    within = np.arange(layers.first, layers.end, dtype=np.int32)
    return (blocks[:, None] * layers.of + within).ravel()


def _import_nixl() -> ModuleType:
    """The bindings alone: the package `nixl` itself loads torch to learn the CUDA version."""
    raises, wheels = logging.raiseExceptions, ["nixl_cu13", "nixl_cu12"]
    version = getattr(sys.modules.get("torch"), "version", None)
    if str(getattr(version, "cuda", None)).startswith("12"):
        wheels.reverse()
    try:
        found = next(wheel for wheel in wheels if importlib.util.find_spec(wheel) is not None)
        return importlib.import_module(f"{found}._bindings")
    except (StopIteration, ImportError, ValueError) as error:
        raise TransportMissing(
            "the nixl transport needs the package nixl: pip install 'nixl>=1.5,<1.6'"
        ) from error
    finally:
        # Importing it configures logging for the whole process; take that back.
        logging.raiseExceptions = raises
        logging.getLogger("nixl").handlers.clear()
        logging.getLogger("nixl").propagate = True


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


def _direct_transports(region: Region) -> set[str]:
    """With these P's kernel or GPU writes into D's memory, and D's UCX is not asked."""
    modules = {name for name in ("xpmem", "knem") if os.path.exists(f"/dev/{name}")}
    return {"cma"} | modules | ({"cuda_ipc"} if region.device != "cpu" else set())


def _allows(tls: str, names: set[str]) -> bool:
    """Whether a UCX_TLS value lets any of these transports be used."""
    listed = set(tls.lstrip("^").split(",")) - {""}
    if tls.startswith("^"):
        return not (names <= listed or listed & {"sm", "shm"})
    return not listed or bool(listed & (names | {"all", "sm", "shm"}))
