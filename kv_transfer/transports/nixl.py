"""NIXL transport over UCX: one-sided writes into D's memory. The only module that imports nixl.

NIXL's progress thread is off because it would occupy a core. UCX makes progress only inside
`poll` and `post`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockId
from baton.kv_transfer.errors import PeerUnreachable, TransportMissing
from baton.kv_transfer.process_identity import ProcessIdentity, current_process_mark
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    Arrived,
    ChannelBroken,
    ChannelEvent,
    UcxConfig,
    Write,
    WriteFailed,
    Written,
)
from baton.kv_transfer.transports.ucx_cuda import ucx_has_cuda

_TICKET_BYTES = 8
_SEPARATOR = b"\0"


class NixlTransport:
    """Creates one NIXL agent per pair, so that closing it disconnects one peer only."""

    name = "nixl"
    is_one_sided = True

    def __init__(
        self,
        region: Region,
        config: UcxConfig,
        staging: Region | None = None,
    ) -> None:
        """Peers can write both regions. `staging` is memory for blocks that are converted."""
        self._nixl = import_nixl()
        self._region = region
        self._staging = staging
        self._config = config
        self.moves_device_memory = _has_cuda(self._nixl, config)
        # For the first peer: the first agent of a process takes half a second to create.
        self._first: NixlChannel | None = self._make_channel()

    def open(self) -> NixlChannel:
        first, self._first = self._first, None
        return first or self._make_channel()

    def close(self) -> None:
        """Destroy the agent of the first peer if none came. Others belong to their channels."""
        if self._first is not None:
            self._first.close()

    def _make_channel(self) -> NixlChannel:
        try:
            return NixlChannel(self._nixl, self._region, self._config, self._staging)
        except nixl_errors(self._nixl) as error:
            raise PeerUnreachable(f"NIXL cannot create an agent: {error!r}") from error


class NixlChannel:
    """Channel with its own NIXL agent, for one region and at most one peer."""

    def __init__(
        self, nixl: ModuleType, region: Region, config: UcxConfig, staging: Region | None
    ) -> None:
        self._nixl = nixl
        self._errors = nixl_errors(nixl)
        self._region = region
        self._mark = current_process_mark()
        self._agent: Any = nixl.nixlAgent(os.urandom(12).hex(), agent_config(nixl))
        self._agent.createBackend("UCX", backend_parameters(config))
        # One for each: they can be on different devices.
        self._registered = [_registration(nixl, each) for each in (region, staging) if each]
        for registered in self._registered:
            self._agent.registerMem(registered, [])
        self._metadata: bytes = self._mark.to_bytes() + _SEPARATOR + self._agent.getLocalMD()
        self._peer_mark: ProcessIdentity | None = None
        self._peer_region: Region | None = None
        self._peer_metadata = b""
        tls = os.environ.get("UCX_TLS", config.tls)
        self._is_direct = _allows(tls, _direct_transports(region))
        self._peer_name = ""  # of the peer's agent, once loaded
        self._lists_by_parts: dict[int, tuple[int, int]] = {}
        self._handle_by_write: dict[int, int] = {}
        self._failures: list[ChannelEvent] = []

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        """Store the peer's metadata. P loads it into its agent on first use, D never does."""
        mark, separator, agent_metadata = metadata.partition(_SEPARATOR)
        if not separator:
            raise PeerUnreachable("the peer sent no connection data")
        try:
            self._peer_mark = ProcessIdentity.from_bytes(mark)
        except ValueError as error:
            raise PeerUnreachable("the peer's connection data lack its process identity") from error
        self._peer_metadata, self._peer_region = agent_metadata, region

    @property
    def close_stops_writes(self) -> bool:
        is_near = self._peer_mark is not None and self._peer_mark.is_near(self._mark)
        return not (is_near and self._is_direct)

    def is_peer_gone(self) -> bool:
        mark = self._peer_mark
        return mark is not None and mark.is_near(self._mark) and mark.is_gone()

    def _load_peer(self) -> str:
        """Load the peer's metadata, once. Return the name of its agent."""
        if not self._peer_name:
            name = self._agent.loadRemoteMD(self._peer_metadata)
            self._peer_name = name.decode() if isinstance(name, bytes) else name
        return self._peer_name

    def _get_lists(self, num_parts: int) -> tuple[int, int]:
        """Return our and the peer's descriptors of all blocks split into `num_parts`.

        They are prepared on first use. Writes refer to the descriptors by index.
        """
        lists = self._lists_by_parts.get(num_parts)
        if lists is None:
            if self._peer_region is None:
                raise PeerUnreachable("the peer is not connected yet")
            lists = self._lists_by_parts[num_parts] = (
                self._prepare(self._nixl.NIXL_INIT_AGENT, self._region, num_parts),
                self._prepare(self._load_peer(), self._peer_region, num_parts),
            )
        return lists

    def _prepare(self, agent_name: str, region: Region, num_parts: int) -> int:
        size, count = region.block_bytes // num_parts, region.num_blocks * num_parts
        strided = [[region.base, size, _device_number(region), size, count]]
        blocks = np.array(strided, dtype=np.uint64)
        kind = _memory_kind(self._nixl, region)
        return int(self._agent.prepXferDlist(agent_name, kind, blocks, []))

    def receive_into(self, region: Region) -> None:
        """No-op: P writes any registered memory."""

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        """No-op: one-sided writes need no posted receive."""

    def cancel(self, ticket: int) -> None:
        """No-op: only P knows which writes are in flight."""

    def post(self, write: Write) -> None:
        sources = write.layers.places(write.sources).astype(np.int32)
        targets = write.layers.places(write.targets).astype(np.int32)
        try:
            local, remote = self._get_lists(write.layers.of)
            handle = self._agent.makeXferReq(self._nixl.NIXL_WRITE, local, sources, remote, targets)
            self._handle_by_write[write.write_id] = handle
            self._agent.postXferReq(handle, b"")
        except self._errors as error:
            self._fail(write.write_id, f"post: {error!r}")

    def notify(self, ticket: int, note: bytes) -> None:
        try:
            payload = ticket.to_bytes(_TICKET_BYTES, "big") + note
            self._agent.genNotif(self._load_peer(), payload)
        except self._errors as error:
            self._failures.append(ChannelBroken(f"notify: {error!r}"))

    def poll(self) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        for write_id, handle in list(self._handle_by_write.items()):
            if self._end_if_landed(write_id, handle):
                events.append(Written(write_id))
        # This call also drives UCX progress when no local write is in flight.
        for payloads in self._agent.getNotifs({}, []).values():
            events += [_arrived(payload) for payload in payloads]
        failures, self._failures = self._failures, []
        return events + failures

    def _end_if_landed(self, write_id: int, handle: int) -> bool:
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
            return  # still in flight: released when the agent is destroyed

    def close(self) -> None:
        """Destroy the agent. Afterwards no UCX write of either side begins or lands here."""
        if self._agent is None:
            return
        for handle in self._handle_by_write.values():
            self._release(handle)
        self._handle_by_write.clear()
        for descriptors in chain.from_iterable(self._lists_by_parts.values()):
            self._agent.releasedDlistH(descriptors)
        if self._peer_name:
            self._agent.invalidateRemoteMD(self._peer_name)
        for registered in self._registered:
            self._agent.deregisterMem(registered, [])
        self._agent = None


def _arrived(payload: bytes) -> Arrived:
    return Arrived(int.from_bytes(payload[:_TICKET_BYTES], "big"), payload[_TICKET_BYTES:])


def import_nixl() -> ModuleType:
    """Import the bindings only: the package `nixl` loads torch to find the CUDA version."""
    raises, wheels = logging.raiseExceptions, ["nixl_cu13", "nixl_cu12"]
    version = getattr(sys.modules.get("torch"), "version", None)
    if str(getattr(version, "cuda", None)).startswith("12"):
        wheels.reverse()
    try:
        wheel = next(wheel for wheel in wheels if importlib.util.find_spec(wheel) is not None)
        return importlib.import_module(f"{wheel}._bindings")
    except (StopIteration, ImportError, ValueError) as error:
        raise TransportMissing(
            "the nixl transport needs the package nixl: pip install 'nixl>=1.5,<1.6'"
        ) from error
    finally:
        # Importing nixl configures logging for the whole process; undo that.
        logging.raiseExceptions = raises
        logging.getLogger("nixl").handlers.clear()
        logging.getLogger("nixl").propagate = True


def nixl_errors(nixl: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exception types that NIXL raises; any other exception is a bug of ours."""
    return tuple(
        value
        for name, value in vars(nixl).items()
        if name.startswith("nixl") and name.endswith("Error")
    )


def agent_config(nixl: ModuleType) -> Any:
    config = nixl.nixlAgentConfig()
    config.useProgThread = False
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    return config


def backend_parameters(config: UcxConfig) -> dict[str, str]:
    settings = {"TLS": config.tls, "NET_DEVICES": config.net_devices}
    for name, value in settings.items():
        if "," in value:
            advice = f"NIXL takes one item; for a list set UCX_{name}"
            raise InvalidConfig(f"{name.lower()}={value}: {advice}")
    chosen = ",".join(f"{name}={value}" for name, value in settings.items() if value)
    return {"engine_config": chosen} if chosen else {}


def _registration(nixl: ModuleType, region: Region) -> Any:
    entry = region.base, region.num_bytes, _device_number(region), ""
    return nixl.nixlRegDList(_memory_kind(nixl, region), [entry])


def _memory_kind(nixl: ModuleType, region: Region) -> Any:
    return nixl.DRAM_SEG if region.device == "cpu" else nixl.VRAM_SEG


def _device_number(region: Region) -> int:
    return int(region.device.partition(":")[2] or 0)


def moves_device_memory(config: UcxConfig) -> bool:
    """Return whether it reads and writes memory of GPUs. Raises TransportMissing."""
    return _has_cuda(import_nixl(), config)


def _has_cuda(nixl: ModuleType, config: UcxConfig) -> bool:
    return ucx_has_cuda(Path(nixl.__file__ or "").parent, config)


def _direct_transports(region: Region) -> set[str]:
    """Return the transports with which P's kernel or GPU writes to D's memory without D's UCX."""
    modules = {name for name in ("xpmem", "knem") if os.path.exists(f"/dev/{name}")}
    return {"cma"} | modules | ({"cuda_ipc"} if region.device != "cpu" else set())


def _allows(tls: str, names: set[str]) -> bool:
    """Return whether a UCX_TLS value allows any of these transports."""
    listed = set(tls.lstrip("^").split(",")) - {""}
    if tls.startswith("^"):
        return not (names <= listed or listed & {"sm", "shm"})
    return not listed or bool(listed & (names | {"all", "sm", "shm"}))
