"""One-sided reads of a server's blocks over NIXL into memory of this node, for one thread."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from mmap import mmap
from typing import Any

import numpy as np

from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.foreign.metadata import ForeignBlocks
from baton.kv_transfer.transports.base import UcxConfig
from baton.kv_transfer.transports.nixl import (
    agent_config,
    backend_parameters,
    import_nixl,
    nixl_errors,
)


class NixlReads:
    """NIXL agent for one server. Raises PeerUnreachable whenever the server cannot be read."""

    def __init__(self, blocks: ForeignBlocks, memory: mmap, config: UcxConfig) -> None:
        self._nixl = nixl = import_nixl()
        self._errors = nixl_errors(nixl)
        self._blocks = blocks
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory = memory  # must outlive the agent
        self._handles: set[int] = set()
        self._agent: Any = None
        self._registered: Any = None
        self._peer = ""
        try:
            self._agent = nixl.nixlAgent(os.urandom(12).hex(), agent_config(nixl))
            self._agent.createBackend("UCX", backend_parameters(config))
            region = [(self._address, len(memory), 0, "")]
            self._registered = nixl.nixlRegDList(nixl.DRAM_SEG, region)
            self._agent.registerMem(self._registered, [])
            name = self._agent.loadRemoteMD(blocks.agent_metadata)
            self._peer = name.decode(errors="replace") if isinstance(name, bytes) else name
        except self._errors as error:
            self.close()
            raise PeerUnreachable(f"NIXL does not accept its metadata: {error!r}") from error

    def read(self, block_ids: Sequence[int], offset: int) -> int:
        """Begin to read all layers of these blocks, block by block, to `offset` in the memory."""
        kind = self._nixl.DRAM_SEG if self._blocks.is_on_cpu else self._nixl.VRAM_SEG
        try:
            handle = int(
                self._agent.createXferReq(
                    self._nixl.NIXL_READ,
                    self._nixl.nixlXferDList(self._nixl.DRAM_SEG, self._local(block_ids, offset)),
                    self._nixl.nixlXferDList(kind, self._remote(block_ids)),
                    self._peer,
                    b"",
                )
            )
            self._handles.add(handle)
            self._agent.postXferReq(handle, b"")
        except self._errors as error:
            raise PeerUnreachable(f"it cannot be read: {error!r}") from error
        return handle

    def is_read(self, handle: int) -> bool:
        """Return whether a read has ended."""
        try:
            status = self._agent.getXferStatus(handle)
            if status == self._nixl.NIXL_IN_PROG:
                return False
            if status != self._nixl.NIXL_SUCCESS:
                raise PeerUnreachable(f"a read has failed: {status}")
            self._handles.remove(handle)
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            raise PeerUnreachable(f"a read has failed: {error!r}") from error
        return True

    def notify(self, text: str) -> None:
        try:
            self._agent.genNotif(self._peer, text.encode())
        except self._errors as error:
            raise PeerUnreachable(f"it cannot be notified: {error!r}") from error

    def progress(self) -> None:
        """Drive UCX, which sends notifications. Those of the server have no meaning here."""
        try:
            self._agent.getNotifs({}, [])
        except self._errors as error:
            raise PeerUnreachable(f"the connection is broken: {error!r}") from error

    def close(self) -> None:
        """Destroy the agent. No read writes into the memory afterwards."""
        if self._agent is None:
            return
        for handle in self._handles:
            self._try(self._agent.releaseXferReq, handle)  # in flight: ends with the agent
        self._handles.clear()
        if self._peer:
            self._try(self._agent.invalidateRemoteMD, self._peer)
        if self._registered is not None:
            self._try(self._agent.deregisterMem, self._registered, [])
        self._agent = None

    def _try(self, method: Any, *given: object) -> None:
        try:
            method(*given)
        except self._errors:
            return

    def _local(self, block_ids: Sequence[int], offset: int) -> Any:
        size = self._blocks.layout.layer_bytes
        num_parts = len(block_ids) * len(self._blocks.layer_addresses)
        addresses = self._address + offset + np.arange(num_parts, dtype=np.uint64) * size
        return _descriptors(addresses, size, 0)

    def _remote(self, block_ids: Sequence[int]) -> Any:
        blocks = self._blocks
        bases = np.array(blocks.layer_addresses, dtype=np.uint64)
        strides = np.array(blocks.layer_strides, dtype=np.uint64)
        ids = np.array(block_ids, dtype=np.uint64)[:, None]
        return _descriptors(
            (bases + ids * strides).ravel(), blocks.layout.layer_bytes, blocks.device_id
        )


def _descriptors(addresses: Any, size: int, device: int) -> Any:
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, size, device
    return rows
