"""Thin wrapper of the ucxx calls in use. The only module that imports ucxx."""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any

from baton.kv_transfer.errors import TransportMissing
from baton.kv_transfer.protocol.memory_runs import BlockRun
from baton.kv_transfer.transports.staging import Slot


class Ucxx:
    def __init__(self) -> None:
        self.module, self._array_type = _import_ucxx()
        self.error: type[Exception] = self.module.UCXError
        self._any = self.module.UCXXTag(0), self.module.UCXXTagMask(0)

    def send(self, endpoint: Any, what: BlockRun | Slot, tag: int) -> Any:
        """Start a send and return its request. The buffer must not change until it completes."""
        return endpoint.tag_send(self._array(what), self.module.UCXXTag(tag))

    def probe(self, worker: Any) -> Any | None:
        """Return the next incoming message, if any. It must then be received."""
        message = worker.tag_probe(*self._any, True)
        return message if message.matched else None

    def receive(self, worker: Any, message: Any, into: BlockRun | Slot) -> Any:
        return worker.tag_recv_with_handle(self._array(into), message)

    def failure_of(self, request: Any) -> str | None:
        """Return the error of a completed request; None if it succeeded."""
        try:
            request.check_error()
        except self.error as error:
            return repr(error)
        return None

    def _array(self, memory: BlockRun | Slot) -> Any:
        if isinstance(memory, BlockRun):
            buffer = (ctypes.c_char * memory.num_bytes).from_address(memory.address)
            return self._array_type(memoryview(buffer))
        return self._array_type(memory.data)


def _import_ucxx() -> tuple[ModuleType, Any]:
    was_set = "UCX_MEMTYPE_CACHE" in os.environ
    try:
        import ucxx._lib.libucxx as ucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise TransportMissing(
            "the ucxx transport needs the package ucxx: pip install 'ucxx-cu12==0.52.*'"
        ) from error
    if not was_set:
        # Importing ucxx sets this for the whole process, and UCX without CUDA warns about it.
        os.environ.pop("UCX_MEMTYPE_CACHE", None)
    return ucxx, Array
