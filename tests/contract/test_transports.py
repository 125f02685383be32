"""KV transports: the contract of each, between two processes (in-memory: within one)."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from baton.core.ids import BlockId
from baton.kv_transfer.transports.base import (
    Arrived,
    BlocksLanded,
    CancelCompleted,
    ChannelBroken,
    ChannelEvent,
    LayerRange,
    Write,
    WriteFailed,
    Written,
)
from tests.support.transport_endpoints import (
    MAKERS,
    Endpoint,
    EndpointPair,
    EndpointPool,
    ProcessEndpoint,
    memory_endpoints,
    skip_if_missing,
)
from tests.support.waits import await_value

BETWEEN_PROCESSES = [pytest.param(kind, marks=skip_if_missing(kind)) for kind in MAKERS]
IN_MEMORY = ["memory", "memory two-sided", "memory pinned", "memory pinned two-sided"]
EVERYWHERE = [*IN_MEMORY, *BETWEEN_PROCESSES]
UCXX = [pytest.param(kind, marks=skip_if_missing(kind)) for kind in MAKERS if "ucxx" in kind]
TWO_SIDED = ["memory two-sided", "memory pinned two-sided", *UCXX]
ONE_SIDED = [
    "memory",
    "memory pinned",
    *(pytest.param(kind, marks=skip_if_missing(kind)) for kind in MAKERS if "nixl" in kind),
]
TICKET, NOTE = 5, b"{all of it}"
FATES: dict[str, Callable[[ProcessEndpoint], object]] = {
    "closed": lambda end: end.call("close"),
    "stopped": ProcessEndpoint.stop,
    "killed": ProcessEndpoint.kill,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[EndpointPool]:
    pool = EndpointPool()
    yield pool
    pool.close()


@contextmanager
def ends(
    pool: EndpointPool, kind: str, num_blocks: int = 16, block_bytes: int = 4096
) -> Iterator[EndpointPair]:
    if kind.startswith("memory"):
        pair = memory_endpoints(
            num_blocks,
            block_bytes,
            is_one_sided="two-sided" not in kind,
            is_pinned="pinned" in kind,
        )
        pair.connect()
        yield pair
        return
    with (
        pool.end(kind, num_blocks, block_bytes) as d,
        pool.end(kind, num_blocks, block_bytes) as p,
    ):
        pair = EndpointPair(d, p)
        pair.connect()
        yield pair


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def content(place: int, block_bytes: int) -> bytes:
    return random.Random(place).randbytes(block_bytes)


def fill(end: Endpoint, block_ids: tuple[BlockId, ...], block_bytes: int = 4096) -> None:
    for place, block_id in enumerate(block_ids):
        end.call("fill", block_id, content(place, block_bytes))


def push(pair: EndpointPair, sources: tuple[BlockId, ...], targets: tuple[BlockId, ...]) -> None:
    """Run a whole hand-off, in two writes if there is more than one block."""
    pair.d.call("expect", TICKET, targets)
    half = len(sources) // 2
    spans = [(start, end) for start, end in [(0, half), (half, len(sources))] if start < end]
    for write_id, (start, end) in enumerate(spans):
        write = Write(write_id, TICKET, start, sources[start:end], targets[start:end])
        pair.p.call("post", write)
    wait_for(pair.p, *(Written(write_id) for write_id in range(len(spans))))
    pair.p.call("notify", TICKET, NOTE)
    await_value(lambda: arrivals(pair.d) == {TICKET}, what="the arrival")


def arrivals(d: Endpoint) -> set[int]:
    return {event.ticket for event in d.call("seen") if isinstance(event, Arrived)}


def wait_for(end: Endpoint, *events: ChannelEvent) -> None:
    await_value(lambda: set(events) <= set(end.call("seen")), what=f"{events}")


def ended(end: Endpoint) -> bool:
    """Return whether a write or the data path has ended, successfully or not."""
    return any(isinstance(one, Written | WriteFailed | ChannelBroken) for one in end.call("seen"))


@pytest.mark.parametrize("kind", EVERYWHERE)
@pytest.mark.parametrize(("num", "block_bytes"), [(0, 64), (1, 1), (1, 4096), (7, 65536)])
def test_blocks_of_any_size_arrive_complete_and_adjacent_blocks_are_unchanged(
    pool: EndpointPool, kind: str, num: int, block_bytes: int
) -> None:
    sources, targets = ids(*range(num)), ids(*range(num, 0, -1))
    with ends(pool, kind, 16, block_bytes) as pair:
        fill(pair.p, sources, block_bytes)

        push(pair, sources, targets)

        for place, target in enumerate(targets):
            assert pair.d.call("read", target) == content(place, block_bytes)
        for untouched in {*range(16)} - {*targets}:
            assert pair.d.call("read", untouched) == bytes(block_bytes)


@pytest.mark.parametrize("kind", EVERYWHERE)
def test_thousands_of_scattered_blocks_arrive_in_their_slots(pool: EndpointPool, kind: str) -> None:
    num, draw = 2000, random.Random(1)
    sources, targets = (ids(*draw.sample(range(num), num)) for _ in range(2))
    with ends(pool, kind, num, 512) as pair:
        for block_id in range(0, num, 97):
            pair.p.call("fill", sources[block_id], content(block_id, 512))

        push(pair, sources, targets)

        for place in range(0, num, 97):
            assert pair.d.call("read", targets[place]) == content(place, 512)


@pytest.mark.parametrize("kind", EVERYWHERE)
@pytest.mark.parametrize("block_bytes", [4 * 256, 4 * 65536])
def test_layers_land_in_their_blocks_and_the_last_layer_completes_the_ticket(
    pool: EndpointPool, kind: str, block_bytes: int
) -> None:
    sources, targets = ids(0, 1, 2, 3), ids(9, 4, 5, 12)
    whole = Write(0, TICKET, 0, sources[:1], targets[:1])
    first_layers, last_layer = (
        Write(write_id, TICKET, 1, sources[1:], targets[1:], layers)
        for write_id, layers in [(1, LayerRange(0, 3, 4)), (2, LayerRange(3, 4, 4))]
    )
    with ends(pool, kind, 16, block_bytes) as pair:
        fill(pair.p, sources, block_bytes)
        pair.d.call("expect", TICKET, targets)

        pair.p.call("post", whole)
        pair.p.call("post", first_layers)
        wait_for(pair.p, Written(0), Written(1))
        assert Arrived(TICKET) not in pair.d.call("seen")
        pair.p.call("post", last_layer)
        wait_for(pair.p, Written(2))
        pair.p.call("notify", TICKET)
        wait_for(pair.d, Arrived(TICKET))

        for place, target in enumerate(targets):
            assert pair.d.call("read", target) == content(place, block_bytes)
        for untouched in {*range(16)} - {*targets}:
            assert pair.d.call("read", untouched) == bytes(block_bytes)


@pytest.mark.parametrize("kind", EVERYWHERE)
def test_every_write_ends_once_and_every_ticket_arrives_once(pool: EndpointPool, kind: str) -> None:
    with ends(pool, kind) as pair:
        fill(pair.p, ids(0, 1, 2, 3))

        push(pair, ids(0, 1, 2, 3), ids(4, 5, 9, 10))

        for _ in range(20):
            pair.p.call("seen"), pair.d.call("seen")
        assert sorted(pair.p.call("seen"), key=str) == [Written(0), Written(1)]
        arrived = [event for event in pair.d.call("seen") if not isinstance(event, BlocksLanded)]
        assert [type(event) for event in arrived] == [Arrived]
        assert arrived[0].ticket == TICKET


@pytest.mark.parametrize("kind", TWO_SIDED)
def test_complete_blocks_are_reported_before_the_last_has_arrived(
    pool: EndpointPool, kind: str
) -> None:
    with ends(pool, kind) as pair:
        fill(pair.p, ids(0, 1))
        pair.d.call("expect", TICKET, ids(5, 9, 4))

        pair.p.call("post", Write(0, TICKET, 0, ids(0, 1), ids(5, 9)))
        wait_for(pair.d, BlocksLanded(TICKET, 2))

        assert pair.d.call("read", BlockId(9)) == content(1, 4096)
        assert not arrivals(pair.d)


@pytest.mark.parametrize("kind", ONE_SIDED)
@pytest.mark.parametrize(
    "note", [b"", NOTE, bytes(range(256)) * 256], ids=["none", "some", "64 KiB"]
)
def test_the_note_of_a_notification_arrives(pool: EndpointPool, kind: str, note: bytes) -> None:
    with ends(pool, kind) as pair:
        pair.p.call("notify", TICKET, note)

        wait_for(pair.d, Arrived(TICKET, note))


@pytest.mark.parametrize("kind", TWO_SIDED)
def test_a_cancelled_ticket_completes_once_and_its_late_writes_are_dropped(
    pool: EndpointPool, kind: str
) -> None:
    with ends(pool, kind) as pair:
        fill(pair.p, ids(0, 1))
        pair.d.call("expect", TICKET, ids(7, 8))

        pair.d.call("cancel", TICKET)
        wait_for(pair.d, CancelCompleted(TICKET))
        pair.p.call("post", Write(0, TICKET, 0, ids(0, 1), ids(7, 8)))
        if kind != "memory two-sided":
            wait_for(pair.p, Written(0))

        assert pair.d.call("seen") == [CancelCompleted(TICKET)]
        assert pair.d.call("read", BlockId(7)) == bytes(4096)


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_d_receives_the_next_write_after_p_was_killed_during_a_write(
    pool: EndpointPool, kind: str
) -> None:
    num = 512
    with pool.end(kind, num, 65536) as d:
        with pool.end(kind, num, 65536) as p:
            EndpointPair(d, p).connect()
            blocks = ids(*range(num))
            d.call("expect", TICKET, blocks)
            p.send("post", Write(0, TICKET, 0, blocks, blocks))
            p.kill()
            d.call("seen")
            d.call("reopen")

        with pool.end(kind, num, 65536) as next_p:
            fill(next_p, ids(0, 1), 65536)
            pair = EndpointPair(d, next_p)
            pair.connect()
            push(pair, ids(0, 1), ids(3, 5))
            assert d.call("read", BlockId(5)) == content(1, 65536)
            assert TICKET in arrivals(d)


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_p_sends_the_next_write_after_d_was_killed_during_a_write(
    pool: EndpointPool, kind: str
) -> None:
    num = 512
    with pool.end(kind, num, 65536) as p:
        with pool.end(kind, num, 65536) as d:
            EndpointPair(d, p).connect()
            blocks = ids(*range(num))
            d.call("expect", TICKET, blocks)
            d.stop()
            p.send("post", Write(0, TICKET, 0, blocks, blocks))
            p.wait_for_answer()
            d.resume()
            d.kill()
            await_value(lambda: ended(p), what="an end of the write")
            p.call("reopen")

        with pool.end(kind, num, 65536) as next_d:
            fill(p, ids(0, 1), 65536)
            pair = EndpointPair(next_d, p)
            pair.connect()
            push(pair, ids(0, 1), ids(3, 5))
            assert next_d.call("read", BlockId(5)) == content(1, 65536)


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_suspended_writer_cannot_write_after_the_end_was_closed(
    pool: EndpointPool, kind: str
) -> None:
    num = 2048
    with ends(pool, kind, num, 65536) as pair:
        blocks = ids(*range(num))
        assert isinstance(pair.p, ProcessEndpoint)
        pair.p.call("fill", BlockId(num - 1), b"x" * 65536)
        pair.d.call("expect", TICKET, blocks)
        pair.p.call("post", Write(0, TICKET, 0, blocks[:1], blocks[:1]))
        wait_for(pair.p, Written(0))
        pair.p.send("post", Write(1, TICKET, 1, blocks[1:], blocks[1:]))
        pair.p.stop()
        stops_writes = pair.d.call("close_stops_writes")

        pair.d.call("close")
        for block_id in (1, num // 2, num - 1):
            pair.d.call("fill", BlockId(block_id), b"new user")
        pair.p.resume()
        pair.p.wait_for_answer()
        await_value(lambda: ended(pair.p), what="an end of the write")

        kept = [pair.d.call("read", BlockId(b))[:8] == b"new user" for b in (1, num // 2, num - 1)]
        assert all(kept) or not stops_writes
        # Otherwise the peer writes directly, and only its message or its death ends the fence.
        assert stops_writes is (kind != "nixl default")


@pytest.mark.parametrize("kind", ["nixl tcp", "nixl default"])
def test_d_detects_that_a_process_on_its_machine_has_ended(pool: EndpointPool, kind: str) -> None:
    with ends(pool, kind) as pair:
        assert isinstance(pair.p, ProcessEndpoint)
        assert pair.d.call("is_peer_gone") is False

        pair.p.kill()

        assert pair.d.call("is_peer_gone") is True


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_closing_during_a_write_is_fast_and_logs_nothing(
    pool: EndpointPool, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with ends(pool, kind, 512, 65536) as pair:
        blocks = ids(*range(512))
        pair.d.call("expect", TICKET, blocks)
        pair.p.call("post", Write(0, TICKET, 0, blocks, blocks))

        pair.p.call("close")
        pair.d.call("close")

    assert "ERROR" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
@pytest.mark.parametrize("fate", FATES)
def test_d_closes_with_unread_messages_and_leaks_nothing(
    pool: EndpointPool, kind: str, fate: str
) -> None:
    with ends(pool, kind, 512, 65536) as pair:
        assert isinstance(pair.d, ProcessEndpoint)
        assert isinstance(pair.p, ProcessEndpoint)
        pair.d.call("close")
        num_open_files = pair.d.call("num_open_files")
        pair.d.call("reopen")
        pair.p.call("reopen")
        pair.connect()
        push(pair, ids(0), ids(0))
        blocks = ids(*range(512))
        pair.d.call("expect", TICKET + 1, blocks)

        pair.d.stop()
        pair.p.call("post", Write(2, TICKET + 1, 0, blocks, blocks[::-1]))
        FATES[fate](pair.p)
        pair.d.send("close")
        pair.d.resume()
        pair.d.wait_for_answer()

        assert pair.d.call("num_open_files") == num_open_files


@pytest.mark.parametrize(
    ("modules", "transport"),
    [
        ("nixl_cu12 nixl_cu13", "transports.nixl.NixlTransport"),
        ("ucxx", "transports.ucxx.UcxxTransport"),
    ],
)
def test_a_missing_library_is_reported_in_one_line_with_the_package(
    modules: str, transport: str
) -> None:
    file, name = transport.rsplit(".", 1)
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({modules.split()}))\n"
        f"from baton.kv_transfer.protocol.messages import Region\n"
        f"from baton.kv_transfer.transports.base import UcxConfig\n"
        f"from baton.kv_transfer.{file} import {name}\n"
        f"{name}(Region(0, 1, 1), UcxConfig())"
    )

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    last = result.stderr.strip().splitlines()[-1]
    assert "TransportMissing" in last
    assert "pip install" in last
