"""Collective operations of ranks on one machine, in memory that their processes share."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional

from baton.core.errors import InvalidConfig
from baton.engine.errors import ProcessLost
from baton.engine.runner.kernels.abi import RankLinks as LinksStruct
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.rank_group import Shard

BUFFER_BYTES = 1 << 18  # of a step: larger tensors take several
MESSAGE_BYTES = 1 << 13  # of a message's first step
HEADER_BYTES = 8
# Ranks compute the same, so one waits for another as long as a part of a layer takes longer there.
# With a difference of this time in each, a pass would take a quarter of an hour.
PATIENCE_S = 30.0
FOR_EVER = -1


def links_bytes(kernels: Kernels, num_ranks: int) -> int:
    """Return the size of the memory that the ranks share."""
    return int(kernels.library.baton_rank_bytes(num_ranks, BUFFER_BYTES))


class RankLinks:
    """Links of one rank to all others. Only the thread that runs passes uses them, but for `end`.

    Implements `RankGroup` for a rank that follows the first one: it is told what to multiply.
    """

    def __init__(
        self, kernels: Kernels, memory: mmap.mmap, shard: Shard, patience_s: float | None = None
    ) -> None:
        """`patience_s` limits the wait for another rank that has not ended; None: nothing does."""
        self.shard = shard
        self._patience_s = patience_s
        self._kernels = kernels
        self._memory = memory  # owns what the struct points to
        self._struct = LinksStruct(
            shared=ctypes.addressof(ctypes.c_char.from_buffer(memory)),
            rank=shard.rank,
            size=shard.size,
            buffer_bytes=BUFFER_BYTES,
            patience_ms=FOR_EVER if patience_s is None else int(1000 * patience_s),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    @property
    def spent_s(self) -> float:
        """Return how long all calls have taken so far."""
        return float(self._struct.spent_ns / 1e9)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        is_float32 = tensor.dtype is torch.float32
        if not is_float32 and tensor.dtype is not torch.bfloat16:
            return self.all_reduce(tensor.float()).to(tensor.dtype)
        self._kernels.library.baton_all_reduce(
            self._struct, tensor.data_ptr(), tensor.numel(), is_float32, self._kernels.num_threads
        )
        self.check()
        return tensor

    def multiply(self, part: Linear, hidden_states: Tensor, num_rows: int) -> Tensor:
        products = self._padded(part(hidden_states), num_rows)
        self.gather(products)
        return products

    def gather(self, tensor: Tensor, gathered: Tensor | None = None) -> None:
        """Copy the tensors of all ranks, which have one size, into one of [ranks, ..]."""
        tensor = tensor.contiguous()
        destination = None if gathered is None else gathered.data_ptr()
        self._kernels.library.baton_all_gather(
            self._struct, tensor.data_ptr(), destination, tensor.nbytes
        )
        self.check()

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first rank; that of others is overwritten."""
        tensor = tensor.contiguous()
        self._kernels.library.baton_broadcast(self._struct, tensor.data_ptr(), tensor.nbytes)
        self.check()
        return tensor

    def send(self, message: object) -> None:
        """Send a message from the first rank to all others."""
        written = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        size = max(MESSAGE_BYTES, HEADER_BYTES + len(written))
        buffer = bytearray(size)
        buffer[:HEADER_BYTES] = len(written).to_bytes(HEADER_BYTES, "little")
        buffer[HEADER_BYTES : HEADER_BYTES + len(written)] = written
        self._broadcast(buffer, 0, MESSAGE_BYTES)
        self._broadcast(buffer, MESSAGE_BYTES, size)

    def receive(self) -> object:
        """Wait for the next message of the first rank."""
        buffer = bytearray(MESSAGE_BYTES)
        self._broadcast(buffer, 0, MESSAGE_BYTES)
        size = HEADER_BYTES + int.from_bytes(buffer[:HEADER_BYTES], "little")
        if size > MESSAGE_BYTES:
            buffer.extend(bytes(size - MESSAGE_BYTES))
            self._broadcast(buffer, MESSAGE_BYTES, size)
        return pickle.loads(memoryview(buffer)[HEADER_BYTES:size])

    def meet(self) -> None:
        """Wait until all ranks have come here."""
        self.gather(torch.zeros(1, dtype=torch.uint8))

    def check(self) -> None:
        """Raise ProcessLost if another rank has ended or not come in time."""
        if self._struct.missing:
            rank, hangs = self._struct.missing - 1, f"hangs: nothing for {self._patience_s} s"
            has_ended = self._kernels.library.baton_rank_has_ended(self._struct.shared, rank)
            raise ProcessLost(f"rank {rank} of this node {'has ended' if has_ended else hangs}")

    def end(self, rank: int) -> None:
        """Let all that wait for a rank, or will, know that it has ended. For any thread."""
        self._kernels.library.baton_end_rank(self._struct.shared, rank)

    def beats(self, rank: int) -> int:
        """Return a number that grows while ranks compute, and while this one waits. Any thread."""
        waits = self._kernels.library.baton_rank_beats(self._struct.shared, rank)
        return int(self._struct.calls + waits)

    def _padded(self, products: Tensor, num_rows: int) -> Tensor:
        """Return products of as many rows as each rank has of these, but for the last one."""
        missing = len(Shard(0, self.shard.size).rows_of(num_rows)) - products.shape[1]
        return functional.pad(products, (0, missing)) if missing else products

    def _broadcast(self, buffer: bytearray, first: int, end: int) -> None:
        if first < end:
            view = (ctypes.c_char * (end - first)).from_buffer(buffer, first)
            self._kernels.library.baton_broadcast(self._struct, view, end - first)
            self.check()


def make_shared_memory(name: str, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Return zeroed memory, and its file descriptor for other processes. Raises InvalidConfig."""
    if not hasattr(os, "memfd_create"):
        raise InvalidConfig("--tensor-parallel-size needs Linux: its processes share memory")
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        return map_shared_memory(fd, num_bytes), fd
    except BaseException:
        os.close(fd)
        raise


def map_shared_memory(fd: int, num_bytes: int) -> mmap.mmap:
    """Map memory of another process, on huge pages where the machine supports them."""
    memory = mmap.mmap(fd, num_bytes)
    with suppress(OSError):  # most machines allow them for private memory alone
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
