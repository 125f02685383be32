"""Reads of KV from a vLLM server that is faked by a real side channel and a real NIXL agent."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from typing import Any

import pytest

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import BlockId
from baton.engine.runner.device.host_memory import huge_page_memory
from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.foreign_kv import (
    ForeignPull,
    ForeignPulled,
    ForeignPullId,
    ForeignRelease,
)
from baton.kv_transfer.layout import KvPacking
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.transports.base import UcxConfig
from baton.kv_transfer.types import KvOrders
from baton.node.kv.foreign.config import ForeignSource
from baton.node.kv.foreign.connection import ReadSettings
from baton.node.kv.foreign.reader import VllmReader
from baton.node.kv.foreign.session import RunRead, remote_blocks
from tests.support.device_kv import DeviceMemory
from tests.support.fake_vllm import HOST, LAYOUT, FakeGeometry, FakeVllm, on_engine

BLOCK_SIZE = LAYOUT.block_size
LOOPBACK = UcxConfig("tcp", "lo")
END_S = 20.0


class Node:
    """A reader as a node uses it. What is converted is kept as bytes, by block of the server."""

    def __init__(self, *sources: ForeignSource) -> None:
        self.converted: list[tuple[RunRead, bytes]] = []
        self.woken = queue.SimpleQueue[None]()
        self._calls = queue.SimpleQueue[None]()  # of the clock
        self.late_s = 0.0  # by which the clock is ahead
        self.reader = VllmReader(
            sources, self._settings(), self._convert, lambda: self.woken.put(None), self.clock
        )

    def clock(self) -> float:
        self._calls.put(None)
        return time.monotonic() + self.late_s

    def await_turns(self, number: int = 5) -> None:
        """Wait until the reader has looked at its connections again, so many times."""
        while not self._calls.empty():
            self._calls.get()
        for _ in range(2 * number):
            self._calls.get(timeout=END_S)

    def pull(
        self,
        kv: ForeignKv,
        places: tuple[int, ...],
        *,
        pull_id: int = 1,
        age_s: float = 0.0,
    ) -> None:
        blocks = tuple(BlockId(100 + place) for place in places)
        received_s = time.monotonic() - age_s
        order = ForeignPull(ForeignPullId(pull_id), kv, received_s, places, blocks)
        self.order(order)

    def order(self, order: ForeignPull | ForeignRelease) -> None:
        self.reader.start(KvOrders(foreign=(order,)), now=0.0)

    def await_end(self, number: int = 1) -> list[ForeignPulled]:
        ended: list[ForeignPulled] = []
        while len(ended) < number:
            self.woken.get(timeout=END_S)
            ended += self.poll()
        return ended

    def poll(self) -> tuple[ForeignPulled, ...]:
        return self.reader.poll(now=0.0).foreign

    def _settings(self) -> ReadSettings:
        return ReadSettings(LAYOUT, LOOPBACK, huge_page_memory, self._release)

    def _release(self, memory: mmap) -> None:
        """On a CPU the memory is freed with its last reference."""

    def _convert(self, read: RunRead) -> Fence:
        count = len(read.run.source) * read.blocks.layout.block_bytes
        memory, offset = read.bay
        self.converted.append((read, memory[offset : offset + count]))
        return PASSED


class DeviceNode(Node):
    """A node whose staging memory is pinned, and copied to a device when it is converted."""

    def __init__(self, *sources: ForeignSource) -> None:
        super().__init__(*sources)
        self.memory = DeviceMemory(num_blocks=1)
        self.copied: list[Fence] = []  # after each run
        self.released = queue.SimpleQueue[bool]()  # whether the first run had been copied

    @property
    def num_pinned(self) -> int:
        return self.memory.stream.num_pinned

    def await_read(self) -> None:
        """Wait until a pull of one run has been read, without converting it."""
        for _ in ("run", "end"):
            self.woken.get(timeout=END_S)

    def poll(self) -> tuple[ForeignPulled, ...]:
        return self.reader.poll(now=0.0).foreign

    def _settings(self) -> ReadSettings:
        return replace(super()._settings(), allocate=self._allocate)

    def _allocate(self, num_bytes: int) -> mmap:
        memory = huge_page_memory(num_bytes)
        self.memory.copies.pin(memory)
        return memory

    def _release(self, memory: mmap) -> None:
        is_copied = bool(self.copied) and self.copied[0].is_passed
        self.memory.copies.unpin(memory)
        self.released.put(is_copied)

    def _convert(self, read: RunRead) -> Fence:
        super()._convert(read)
        memory, offset = read.bay
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
        source = BlockMemory(address, 1, self.memory.copies.block_bytes)
        self.copied.append(self.memory.copies.copy_in(source, [0], [0]))
        return self.copied[-1]


@contextmanager
def node(*sources: ForeignSource) -> Iterator[Node]:
    it = Node(*sources)
    with it.reader:
        yield it


@contextmanager
def device_node(server: FakeVllm) -> Iterator[DeviceNode]:
    it = DeviceNode(server.source)
    with it.reader:
        yield it
    it.memory.copies.close()
    it.memory.check()


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as it:
        yield it


def fails(it: Node, kv: ForeignKv, reason: str, places: tuple[int, ...] = (0, 1)) -> None:
    """Pull, and see that no block is filled, for this reason."""
    before = it.reader.failures[reason]
    it.pull(kv, places)
    [ended] = it.await_end()
    assert not any(ended.are_filled)
    assert not it.converted
    assert it.reader.failures[reason] == before + 1


def test_blocks_are_read_and_the_server_may_release_them(server: FakeVllm) -> None:
    with node(server.source) as it:
        it.pull(server.kv((5, 3, 9)), tuple(range(5)))
        [ended] = it.await_end()
        assert ended.are_filled == (True,) * 5
        [(read, content)] = it.converted
        assert content == server.block(5) + server.block(3) + server.block(9)
        assert read.run.first_token == 0
        assert read.staged_for(LAYOUT).block_ids == tuple(range(100, 105))
        server.await_note(lambda note: note == "HB:cmpl-1")
        server.await_note(lambda note: note == "cmpl-1:1")
        assert it.reader.num_bytes == len(content)


def test_only_blocks_with_missing_tokens_are_read(server: FakeVllm) -> None:
    with node(server.source) as it:
        it.pull(server.kv((5, 3, 9, 4)), (3, 4, 7))
        it.await_end()
        runs = [
            (remote_blocks(read.pull, read.run), read.run.first_token) for read, _ in it.converted
        ]
        # A block of the server has two of this node.
        assert runs == [((3, 9), 16), ((4,), 16)]


def test_a_long_prompt_is_read_in_runs() -> None:
    # Blocks of 3 MiB, so that five fit into half of the staging memory.
    large = FakeGeometry(num_blocks=16, block_size=1 << 13)
    with FakeVllm(large) as server, node(server.source) as it:
        num_places = 12 * large.block_size // BLOCK_SIZE
        it.pull(server.kv(tuple(range(12))), tuple(range(num_places)))
        [ended] = it.await_end()
        assert all(ended.are_filled)
        assert [len(read.run.source) for read, _ in it.converted] == [5, 5, 2]
        assert b"".join(content for _, content in it.converted) == b"".join(
            server.block(block_id) for block_id in range(12)
        )


def test_a_second_pull_needs_no_second_handshake(server: FakeVllm) -> None:
    with node(server.source) as it:
        for number in (1, 2):
            it.pull(server.kv((number,), f"cmpl-{number}"), (0, 1), pull_id=number)
            it.await_end()
        assert server.num_requests == 1
        server.await_note(lambda note: note == "cmpl-2:1")


def test_kv_that_is_not_needed_is_released(server: FakeVllm) -> None:
    with node(server.source) as it:
        now = it.clock()
        # The second one's lease has ended: the server would count a late notification.
        for name, received_s in (("cmpl-1", now), ("cmpl-2", now - 31.0), ("cmpl-3", now)):
            it.order(ForeignRelease(server.kv((1,), name), received_s))
        server.await_note(lambda note: note == "cmpl-3:1")
        assert "cmpl-1:1" in server.notes
        assert "cmpl-2:1" not in server.notes
        assert not it.converted


def test_a_used_request_is_not_read_again(server: FakeVllm) -> None:
    with node(server.source) as it:
        it.pull(server.kv((1,)), (0, 1))
        it.await_end()
        it.converted.clear()
        fails(it, server.kv((1,)), "expired")


# --- staging memory ------------------------------------------------------------------


def restart(server: FakeVllm, number: int) -> ForeignKv:
    """Let the server be another engine. Returns KV that it holds."""
    server.engine_id = server.metadata["engine_id"] = f"engine-{number}"
    return server.kv((number,), f"cmpl-{number}")


def test_closed_sessions_keep_no_memory_pinned(server: FakeVllm) -> None:
    with device_node(server) as it:
        for number in range(2, 6):
            it.pull(restart(server, number), (0, 1), pull_id=number)
            assert all(it.await_end()[0].are_filled)
            assert it.num_pinned == 1


def test_memory_of_a_closed_session_stays_pinned_until_its_run_is_converted(
    server: FakeVllm,
) -> None:
    with device_node(server) as it:
        it.pull(server.kv((1,)), (0, 1))
        it.await_read()
        it.pull(restart(server, 2), (0, 1), pull_id=2)
        it.await_read()
        assert it.num_pinned == 2  # the first session is closed
        ended = it.poll()
        assert [all(each.are_filled) for each in ended] == [True, True]
        assert it.released.get(timeout=END_S)
        assert [content for _, content in it.converted] == [server.block(1), server.block(2)]
        assert it.num_pinned == 1


@pytest.mark.parametrize(
    "broken", [{"agent_metadata": b"broken"}, {"kv_caches_base_addr": [4096] * 3}]
)
def test_a_session_that_cannot_read_keeps_no_memory_pinned(
    server: FakeVllm, broken: dict[str, Any]
) -> None:
    server.metadata.update(broken)
    with device_node(server) as it:
        fails(it, server.kv((1,)), "read")
        assert it.num_pinned == 0


# --- leases -------------------------------------------------------------------------


def test_kv_is_not_read_near_the_end_of_its_lease(server: FakeVllm) -> None:
    with node(server.source) as it:
        assert it.reader.may_read(server.kv((1,)), time.monotonic() - 24.0, time.monotonic())
        assert not it.reader.may_read(server.kv((1,)), time.monotonic() - 26.0, time.monotonic())
        it.pull(server.kv((1,)), (0, 1), age_s=26.0)
        [ended] = it.await_end()
        assert not any(ended.are_filled)
        assert it.reader.failures["expired"] == 1


def test_kv_is_not_read_near_an_expiry_by_the_servers_clock(server: FakeVllm) -> None:
    with node(server.source) as it:
        kv = replace(server.kv((1,)), expires_at_s=time.perf_counter() + 4.0)
        fails(it, kv, "expired")
        later = replace(server.kv((1,), "cmpl-2"), expires_at_s=time.perf_counter() + 9.0)
        it.pull(later, (0, 1))
        [ended] = it.await_end()
        assert all(ended.are_filled)


# --- servers that do not fit ----------------------------------------------------------


def test_a_server_with_other_kv_is_refused(server: FakeVllm) -> None:
    server.metadata["kv_cache_layout"] = "LBNHC"
    with node(server.source) as it:
        fails(it, server.kv((1,)), "refused")
        now = it.clock()
        assert not it.reader.may_read(server.kv((2,)), now, now)


def test_a_client_that_names_another_engine_costs_only_its_pull(server: FakeVllm) -> None:
    with node(server.source) as it:
        fails(it, on_engine(server.kv((1,)), "engine-2"), "refused")
        it.pull(server.kv((1,), "cmpl-2"), (0, 1))
        assert all(it.await_end()[0].are_filled)


@pytest.mark.parametrize("seed", range(4))
def test_broken_metadata_of_nixl_fail_the_pull(server: FakeVllm, seed: int) -> None:
    broken = bytearray(server.metadata["agent_metadata"])
    broken[seed * 5 % 40] ^= 0xFF  # in the header, before the addresses
    server.metadata["agent_metadata"] = bytes(broken[: len(broken) - seed * 40])
    with node(server.source) as it:
        it.pull(server.kv((1,)), (0, 1))
        [ended] = it.await_end()
        if any(ended.are_filled):  # the name of the agent was changed
            assert it.converted[0][1] == server.block(1)


def test_blocks_that_the_server_does_not_have_are_refused(server: FakeVllm) -> None:
    with node(server.source) as it:
        fails(it, server.kv((64,)), "refused")
        server.await_note(lambda note: note == "cmpl-1:1")  # it holds its blocks for nobody
        fails(it, server.kv((1,), "cmpl-3"), "refused", places=(0, 1, 2))
        short = replace(server.kv((1,), "cmpl-4"), num_tokens=16)
        fails(it, short, "refused")
        # The connection is good: the client was wrong.
        it.pull(server.kv((1,), "cmpl-2"), (0, 1))
        assert all(it.await_end()[0].are_filled)


def test_addresses_outside_the_servers_memory_cannot_be_read(server: FakeVllm) -> None:
    server.metadata["kv_caches_base_addr"] = [4096] * 3
    with node(server.source) as it:
        fails(it, server.kv((1,)), "read")


# --- servers that end, and clients that are wrong ------------------------------------------


def test_a_restarted_server_is_found_by_its_new_engine(server: FakeVllm) -> None:
    with node(server.source) as it:
        it.pull(server.kv((1,)), (0, 1))
        it.await_end()
        it.converted.clear()
        server.engine_id = server.metadata["engine_id"] = "engine-2"
        it.pull(server.kv((2,), "cmpl-2"), (0, 1), pull_id=2)
        assert all(it.await_end()[0].are_filled)
        it.converted.clear()
        fails(it, on_engine(server.kv((1,), "cmpl-3"), "engine-1"), "refused")


def test_a_server_that_does_not_answer_is_avoided(server: FakeVllm) -> None:
    server.answers = False
    with node(server.source) as it:
        it.pull(server.kv((1,)), (0, 1))
        it.await_turns()
        it.late_s = 6.0
        [ended] = it.await_end()
        assert not any(ended.are_filled)
        assert it.reader.failures["unreachable"] == 1
        now = it.clock()
        assert not it.reader.may_read(server.kv((1,)), now, now)
        assert it.reader.may_read(server.kv((1,)), now + 11, now + 11)


def test_servers_that_are_not_listed_are_never_dialled(server: FakeVllm) -> None:
    with node(server.source) as it:
        other = replace(server.kv((1,)), port=server.port + 1)
        assert not it.reader.allows(other)
        assert not it.reader.may_read(other, time.monotonic(), time.monotonic())


@contextmanager
def large_server() -> Iterator[tuple[subprocess.Popen[str], ForeignSource, ForeignKv]]:
    """Run a server in a process of its own. Yields it, and KV of 12 MiB."""
    command = [sys.executable, "-m", "tests.support.fake_vllm"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        source = ForeignSource(HOST, port, "models/demo", KvPacking.VLLM_VEC)
        yield process, source, ForeignKv(HOST, port, "engine-1", "cmpl-1", (0, 1), 2 << 14)
        os.kill(process.pid, signal.SIGKILL)


def freeze_in_read(it: Node, process: subprocess.Popen[str], kv: ForeignKv) -> None:
    """Begin to read from a server that is connected, but does not move."""
    it.pull(replace(kv, request_id="cmpl-0"), (0, 1))
    assert all(it.await_end()[0].are_filled)
    it.converted.clear()
    os.kill(process.pid, signal.SIGSTOP)
    it.pull(kv, tuple(range(kv.num_tokens // BLOCK_SIZE)), pull_id=2)
    it.await_turns()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_a_server_that_ends_during_a_read_costs_only_the_pull(is_killed: bool) -> None:
    with large_server() as (process, source, kv), node(source) as it:
        freeze_in_read(it, process, kv)
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
        else:
            it.late_s = 11.0
        [ended] = it.await_end()
        assert not any(ended.are_filled)
        assert it.reader.failures["read" if is_killed else "late"] == 1


def test_a_read_that_ends_after_the_lease_is_not_used() -> None:
    with large_server() as (process, source, kv), node(replace(source, lease_s=6.0)) as it:
        freeze_in_read(it, process, kv)
        it.late_s = 6.0
        os.kill(process.pid, signal.SIGCONT)
        [ended] = it.await_end()
        assert not any(ended.are_filled)
        assert not it.converted
        assert it.reader.failures["expired"] == 1


def test_a_read_does_not_begin_after_the_lease() -> None:
    with large_server() as (process, source, kv), node(source) as it:
        freeze_in_read(it, process, kv)
        it.pull(replace(kv, request_id="cmpl-2"), (0, 1), pull_id=3, age_s=26.0)
        it.await_turns()
        os.kill(process.pid, signal.SIGCONT)
        first, second = it.await_end(2)
        assert all(first.are_filled)
        assert not any(second.are_filled)
        assert len(it.converted) == 1
