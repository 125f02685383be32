"""KV transfer benchmark: hand-offs between two processes of this machine, and raw references.

Each side is a process on its own core (if there are two). A round measures all sizes in turn:
memcpy, one contiguous NIXL write, scattered blocks over the bare channel, and whole hand-offs
through both KV workers without and with digests. Each measurement draws its blocks at random from
memory much larger than a hand-off, so that CPU caches favour none of them.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.transports.base import Write
from baton.measured_process import MeasuredProcess
from benchmarks.kv.endpoint import EndPlan, HandOffTimes, serve_end
from benchmarks.kv.figures import MIB, KvRound, TailFigure, figure_of
from benchmarks.kv.prefill import Prefill, PrefillTimes

MEMORY_BYTES = 256 * MIB
TAIL_BYTES = 64 * MIB
MIN_LAYER_BYTES = 8192
ANSWER_S = 60.0

OnFigure = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KvBench:
    paths: Sequence[tuple[str, str]]  # transport and UCX_TLS; empty: UCX chooses
    block_bytes: Sequence[int]
    handoff_bytes: Sequence[int]
    num_layers: int
    num_chunks: int
    chunk_s: float
    num_runs: int


def run(bench: KvBench, on_figure: OnFigure) -> tuple[list[dict[str, Any]], list[TailFigure]]:
    figures: list[dict[str, Any]] = []
    tails: list[TailFigure] = []
    for transport, tls in bench.paths:
        for block_bytes in bench.block_bytes:
            with _pair(bench, transport, tls, block_bytes) as pair:
                figures += pair.measure()
                on_figure(f"{pair.path}, {block_bytes >> 10} KiB blocks, whole")
                tails += pair.measure_tails()
                on_figure(f"{pair.path}, {block_bytes >> 10} KiB blocks, chunked")
    return figures, tails


@contextmanager
def _pair(bench: KvBench, transport: str, tls: str, block_bytes: int) -> Iterator[_BenchPair]:
    cpus = sorted(os.sched_getaffinity(0))
    each = [(cpus[0],), (cpus[1],)] if len(cpus) > 1 else [(), ()]
    with ExitStack() as stack:
        ends = []
        for name, its_cpus in zip("dp", each, strict=True):
            plan = EndPlan(
                name,
                transport,
                tls,
                block_bytes,
                num_layers=_num_layers(bench, block_bytes),
                memory_bytes=MEMORY_BYTES,
                cpus=its_cpus,
                whole_bytes=tuple(bench.handoff_bytes),
            )
            end = MeasuredProcess(serve_end, plan, remaining_s=lambda: ANSWER_S)
            ends.append(stack.enter_context(closing(end)))
        yield _BenchPair(bench, f"{transport} {tls or 'shared memory'}", block_bytes, *ends)


def _num_layers(bench: KvBench, block_bytes: int) -> int:
    """Return the number of layers of a block; small blocks have fewer, like small models."""
    largest = max(1, min(bench.num_layers, block_bytes // MIN_LAYER_BYTES))
    return next(number for number in range(largest, 0, -1) if block_bytes % number == 0)


class _BenchPair:
    """Decode side and prefill side, and the measurements between them."""

    def __init__(
        self, bench: KvBench, path: str, block_bytes: int, d: MeasuredProcess, p: MeasuredProcess
    ) -> None:
        self.path = path
        self._bench = bench
        self._block_bytes = block_bytes
        self._num_blocks = MEMORY_BYTES // block_bytes
        self._d, self._p = d, p
        self._draw = random.Random(0)
        self._num_tickets = 0
        for end in (d, p):
            end.receive()
        self._peers = p.call("peers")
        for size in (None, *bench.handoff_bytes):
            ours, theirs = d.call("metadata", size), p.call("metadata", size)
            p.call("connect", size, *ours)
            d.call("connect", size, *theirs)

    def measure(self) -> list[dict[str, Any]]:
        """Measure all sizes in each round, so that a slow phase affects their ratios little."""
        num_blocks_by_size = {
            size: max(1, size // self._block_bytes) for size in self._bench.handoff_bytes
        }
        rounds = [
            [self._round(size, num_blocks) for size, num_blocks in num_blocks_by_size.items()]
            for _ in range(1 + self._bench.num_runs)
        ]
        by_size = zip(*rounds[1:], strict=True)  # the first warms up connections and page mappings
        return [
            figure_of(self.path, self._block_bytes, num_blocks, size, list(found))
            for (size, num_blocks), found in zip(num_blocks_by_size.items(), by_size, strict=True)
        ]

    def measure_tails(self) -> list[TailFigure]:
        return [self._tail(push, verify) for push in ("chunk", "layer") for verify in (False, True)]

    # --- Single measurements ---------------------------------------------------------------

    def _round(self, size: int, num_blocks: int) -> KvRound:
        num_slots = MEMORY_BYTES // size
        places = [self._draw.randrange(num_slots) for _ in range(4)]
        memcpy = self._p.call("copy", places[0] * size, places[1] * size, size)
        contiguous, noticed = self._write(size, (BlockId(places[2]),), (BlockId(places[3]),))
        scattered, _ = self._write(None, self._blocks(num_blocks), self._blocks(num_blocks))
        (sent, landed), (sent_verified, landed_verified) = (
            self._hand_over(num_blocks, verify) for verify in (False, True)
        )
        return KvRound(
            memcpy,
            contiguous,
            noticed,
            scattered,
            written=sent.ended_s - sent.began_s,
            landed=landed.ended_s - sent.began_s,
            verified_written=sent_verified.ended_s - sent_verified.began_s,
            verified_landed=landed_verified.ended_s - sent_verified.began_s,
            handoff=landed.ended_s - landed.began_s,
            handoff_verified=landed_verified.ended_s - landed_verified.began_s,
        )

    def _hand_over(self, num_blocks: int, verify: bool) -> tuple[HandOffTimes, HandOffTimes]:
        handoff_id = self._next_id()
        self._p.call("hold", verify, handoff_id, self._blocks(num_blocks))
        blocks = self._blocks(num_blocks)
        landed = self._d.call("receive", verify, handoff_id, self._peers[verify], blocks)
        return self._p.call("sent", handoff_id), landed

    def _write(
        self, size: int | None, sources: tuple[BlockId, ...], targets: tuple[BlockId, ...]
    ) -> tuple[float, float]:
        """Return the seconds of a bare write until P sees it complete, and until D is notified."""
        ticket = self._next_ticket()
        self._d.send("take_write", size, ticket, targets)
        self._p.send("write", size, Write(ticket, ticket, 0, sources, targets))
        noticed_s: float = self._d.receive()
        self._p.send("rest")
        times: HandOffTimes = self._p.receive()
        self._p.receive()
        return times.ended_s - times.began_s, noticed_s - times.began_s

    def _tail(self, push: str, verify: bool) -> TailFigure:
        num_blocks = max(self._bench.num_chunks, TAIL_BYTES // self._block_bytes)
        self._hand_over(num_blocks, verify)
        rounds = [self._tail_round(num_blocks, push, verify) for _ in range(self._bench.num_runs)]
        whole_s, tail_s, cost_s = (statistics.median(one) for one in zip(*rounds, strict=True))
        return TailFigure(
            path=self.path,
            block_kib=self._block_bytes / 1024,
            push=push,
            verify=verify,
            num_chunks=self._bench.num_chunks,
            handoff_mib=num_blocks * self._block_bytes / MIB,
            whole_ms=whole_s * 1e3,
            tail_ms=tail_s * 1e3,
            tail_share=tail_s / whole_s,
            cost_ms=cost_s * 1e3,
        )

    def _tail_round(self, num_blocks: int, push: str, verify: bool) -> tuple[float, float, float]:
        """Return seconds of a whole hand-off, of the tail after the last chunk, and of pushing."""
        _, whole = self._hand_over(num_blocks, verify)
        alone: PrefillTimes = self._p.call("prefill", verify, self._prefill(num_blocks, "none"))
        prefill = self._prefill(num_blocks, push)
        blocks = self._blocks(num_blocks)
        self._d.send("receive", verify, prefill.handoff_id, self._peers[verify], blocks)
        times: PrefillTimes = self._p.call("prefill", verify, prefill)
        landed: HandOffTimes = self._d.receive()
        cost_s = (times.last_chunk_s - times.began_s) - (alone.last_chunk_s - alone.began_s)
        return whole.ended_s - whole.began_s, landed.ended_s - times.last_chunk_s, cost_s

    def _prefill(self, num_blocks: int, push: str) -> Prefill:
        sources = self._blocks(num_blocks)
        cuts = [num_blocks * i // self._bench.num_chunks for i in range(self._bench.num_chunks + 1)]
        chunks = [sources[a:b] for a, b in pairwise(cuts)]
        value = self._draw.randrange(256)
        return Prefill(self._next_id(), chunks, self._bench.chunk_s, value, push)

    def _blocks(self, num_blocks: int) -> tuple[BlockId, ...]:
        return tuple(BlockId(one) for one in self._draw.sample(range(self._num_blocks), num_blocks))

    def _next_id(self) -> HandoffId:
        return HandoffId(f"bench-{self._next_ticket()}", 0)

    def _next_ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets
