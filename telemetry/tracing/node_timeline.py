"""Timelines of a request and of an engine step on a node, and the spans made from them.

Two threads write it, the engine's and gRPC's. Each field has one writer, except for the end of the
timeline, which depends on both threads and is determined under a lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from baton.core.media import MediaSegment
from baton.core.output import FinishReason, Output
from baton.kv_transfer.records import TransferRecord, TransferRole
from baton.telemetry import names
from baton.telemetry.tracing.request_timeline import LEG_METHOD
from baton.telemetry.tracing.spans import (
    AttributeValue,
    End,
    Span,
    SpanEvent,
    SpanKind,
    SpanLink,
    SpanMaker,
    SpanOutcome,
    ToUnixNs,
    TraceContext,
    child_id,
)

DONE = ("done", "announced")  # outcomes of the record of a completed hand-off
WITHDRAWN = ("revoked", "abort", "the call was cancelled")
FAILED = {
    FinishReason.ERROR: (SpanOutcome.FAILED, "GENERATION_FAILED", "INTERNAL"),
    FinishReason.ABORT: (SpanOutcome.CANCELLED, "", "CANCELLED"),
}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Constants of a node that all its spans carry."""

    role: str
    node_id: str
    incarnation: str
    verifies_kv: bool = False
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prefill chunk: one pass that computed tokens of the request's context."""

    began_s: float
    ended_s: float
    num_tokens: int
    collectives_s: float = 0.0  # 0: the node is one process


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of pictures before a pass; on a GPU, its launch."""

    began_s: float
    ended_s: float
    digests: frozenset[bytes]  # of pictures of the request


@dataclass(frozen=True, slots=True)
class Start:
    at_s: float
    num_cached_tokens: int  # with KV present: prefix hits and received tokens
    num_missing_tokens: int
    step: int


@dataclass(slots=True)
class KvLoad:
    """Load of blocks from below the KV cache, for which a request waits."""

    began_s: float
    num_blocks: int
    ended_s: float | None = None  # None: the request no longer waited for it
    sources: tuple[str | None, ...] = ()  # by block: its tier; None: it was not loaded

    @property
    def num_blocks_by_tier(self) -> Counter[str]:
        """Blocks of each tier; of "" those that were not loaded, or not yet."""
        if self.ended_s is None:
            return Counter({"": self.num_blocks})
        return Counter(source or "" for source in self.sources)


@dataclass(slots=True)
class NodeTimeline:
    parent: TraceContext  # the router's leg
    facts: NodeFacts
    leg: str  # its name, as `leg_name` returns it
    attempt: int
    kv_push_span_id: int | None
    arrival_s: float
    media: tuple[MediaSegment, ...] = ()  # in the prompt
    # Written by the engine's thread.
    encodings: list[Encoding] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    dropped_s: list[float] = field(default_factory=list)  # departures from the batch
    num_missing_tokens: int = 0
    record: TransferRecord | None = None
    pulls: list[TransferRecord] = field(default_factory=list)  # runs of blocks, for its prompt
    loads: list[KvLoad] = field(default_factory=list)
    num_steps: int = 0  # that the request took part in
    # Written by gRPC's thread.
    num_given_before: int | None = None  # tokens of earlier attempts; None before any output
    num_output_tokens: int = 0
    failure: End | None = None  # of the engine, reported by the last output
    is_finished: bool = False  # the last output was given, and is no failure
    end: End | None = None
    _is_moving: bool = False  # a hand-off has begun and its record has not arrived
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def context(self) -> TraceContext:
        """Context of this node's server span, the parent of its other spans of the request."""
        span_id = child_id(self.parent.span_id, self.leg)
        return TraceContext(self.parent.trace_id, span_id, self.parent.is_sampled)

    @property
    def preempted_s(self) -> list[float]:
        """Times at which the request left the batch and later returned."""
        return [at_s for at_s in self.dropped_s if at_s <= self.starts[-1].at_s]

    def note_output(self, output: Output) -> None:
        """Note an output of the call. Only the first and the last one are required."""
        if self.num_given_before is None:
            self.num_given_before = output.first_index
        self.num_output_tokens = output.first_index + len(output.token_ids)
        if output.finish_reason in FAILED:
            outcome, kind, code = FAILED[output.finish_reason]
            reason = "" if output.failure is None else output.failure.reason
            self.failure = End(time.monotonic(), outcome, kind, reason, code)
        elif output.finish_reason not in (None, FinishReason.HANDED_OFF):
            self.is_finished = True

    def begin_transfer(self) -> None:
        with self._lock:
            self._is_moving = self.record is None

    def note_record(self, record: TransferRecord) -> bool:
        """Store the record. Return whether the timeline is complete."""
        with self._lock:
            self.record = record
            self._is_moving = False
            return self.end is not None

    def note_end(self, end: End) -> bool:
        """Store the end of the call. Return whether the timeline is complete."""
        with self._lock:
            self.end = end
            return not self._is_moving

    def note_chunk(self, chunk: PrefillChunk) -> bool:
        """Add a chunk. Return whether the context is now complete."""
        self.chunks.append(chunk)
        self.num_missing_tokens -= chunk.num_tokens
        return self.num_missing_tokens <= 0

    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]:
        """Return the spans of a complete timeline."""
        return list(_NodeSpans(self, to_unix_ns).spans())


class _NodeSpans:
    def __init__(self, timeline: NodeTimeline, to_unix_ns: ToUnixNs) -> None:
        self._timeline = timeline
        self._make = SpanMaker(timeline.parent.trace_id, timeline.facts.role, to_unix_ns)
        self._end = timeline.end or End(timeline.arrival_s, SpanOutcome.FAILED)
        self._server_id = timeline.context.span_id

    def spans(self) -> Iterator[Span]:
        yield self._server()
        match self._timeline.leg:
            case names.PREFETCH:
                waits_from_s = self._timeline.arrival_s
                yield self._wait(names.PREFETCH_WAIT, waits_from_s, self._end, "blocks")
            case names.ENCODE:
                yield from self._prompt(names.ENCODE_WAIT, names.ENCODE_COMPUTE)
            case names.DECODE:
                yield from self._decode()
            case _:
                yield from self._prompt(names.PREFILL_WAIT, names.PREFILL_COMPUTE)

    def _server(self) -> Span:
        timeline = self._timeline
        attributes: dict[str, AttributeValue | None] = {
            names.NODE: timeline.facts.node_id,
            names.INCARNATION: timeline.facts.incarnation,
            names.ATTEMPT: timeline.attempt,
            names.RPC_SYSTEM: "grpc",
            names.RPC_METHOD: LEG_METHOD,
            names.RPC_STATUS: self._end.rpc_status or None,
        }
        return self._make.span(
            timeline.leg,
            timeline.parent.span_id,
            timeline.arrival_s,
            self._end,
            attributes,
            span_id=self._server_id,
            kind=SpanKind.SERVER,
        )

    # --- prefill and encode ---------------------------------------------------------------

    def _prompt(self, wait: str, compute: str) -> Iterator[Span]:
        timeline = self._timeline
        yield self._batch_wait(wait, timeline.arrival_s)
        if timeline.starts:
            yield from self._compute(compute)
        if timeline.record is not None and timeline.record.role is TransferRole.SENT:
            yield self._kv(names.KV_PUSH, timeline.record, span_id=timeline.kv_push_span_id)

    def _compute(self, name: str = names.PREFILL_COMPUTE) -> Iterator[Span]:
        """The passes over the prompt; on decode nodes, only if its KV was not received."""
        timeline, start = self._timeline, self._timeline.starts[0]
        chunks = [chunk for chunk in timeline.chunks if chunk.began_s >= start.at_s]
        is_complete = timeline.num_missing_tokens <= 0 and bool(chunks)
        end = End(chunks[-1].ended_s) if is_complete else self._end
        events = [
            self._make.event(
                names.CHUNK,
                chunk.began_s,
                **{names.TOKENS: chunk.num_tokens, names.STEP_S: chunk.ended_s - chunk.began_s},
            )
            for chunk in chunks
        ]
        attributes: dict[str, AttributeValue | None] = {
            names.TOKENS: sum(chunk.num_tokens for chunk in chunks),
            names.CACHED_TOKENS: start.num_cached_tokens,
            names.STEPS: len(chunks),
            names.COLLECTIVES_S: sum(chunk.collectives_s for chunk in chunks) or None,
            names.PREEMPTIONS: len(timeline.preempted_s),
            **self._pictures_from(start.num_cached_tokens),
        }
        compute = self._make.span(
            name,
            self._server_id,
            start.at_s,
            end,
            attributes,
            events=(*events, *self._preemptions(), *self._fetched(start.at_s, end.at_s)),
        )
        yield compute
        for number, encoding in enumerate(timeline.encodings):
            yield self._encode(encoding, compute.span_id, number)

    def _pictures_from(self, start: int) -> dict[str, AttributeValue]:
        """Return how many pictures have tokens from `start` on, and were in memory."""
        digests = {
            segment.digest
            for segment in self._timeline.media
            if segment.start + segment.num_tokens > start
        }
        if not digests:
            return {}
        encoded = {each for encoding in self._timeline.encodings for each in encoding.digests}
        return {names.PICTURES: len(digests), names.PICTURES_CACHED: len(digests - encoded)}

    def _encode(self, encoding: Encoding, parent_id: int, number: int) -> Span:
        rows = dict.fromkeys(encoding.digests, 0)
        for segment in self._timeline.media:
            if segment.digest in rows:
                end = segment.first + segment.num_tokens
                rows[segment.digest] = max(rows[segment.digest], end)
        return self._make.span(
            names.ENCODE_PICTURES,
            parent_id,
            encoding.began_s,
            End(encoding.ended_s),
            {names.PICTURES: len(rows), names.PICTURE_ROWS: sum(rows.values())},
            span_id=child_id(parent_id, f"{names.ENCODE_PICTURES}/{number}"),
        )

    # --- decode -------------------------------------------------------------------------

    def _decode(self) -> Iterator[Span]:
        timeline, record = self._timeline, self._timeline.record
        waits_from_s = timeline.arrival_s
        if record is not None and record.role is TransferRole.RECEIVED:
            granted = End(record.began_s)
            yield self._wait(names.DECODE_WAIT, timeline.arrival_s, granted, "blocks")
            has_landed = record.outcome in DONE
            push_id = timeline.kv_push_span_id if has_landed else None
            yield self._kv(names.KV_WAIT, record, links=() if push_id is None else (push_id,))
            waits_from_s = record.ended_s or self._end.at_s
        if waits_from_s < self._end.at_s:
            yield self._batch_wait(names.DECODE_WAIT, waits_from_s)
        if timeline.starts:
            yield from self._compute_on_decode()

    def _compute_on_decode(self) -> Iterator[Span]:
        timeline = self._timeline
        began_s = timeline.starts[0].at_s
        if timeline.chunks:
            yield from self._compute()
            began_s = timeline.chunks[-1].ended_s
            if timeline.num_missing_tokens > 0:
                return
        yield self._make.span(
            names.DECODE_COMPUTE,
            self._server_id,
            began_s,
            self._end,
            self._decode_attributes(began_s),
            events=(
                *(() if timeline.chunks else self._preemptions()),
                *self._fetched(began_s, math.inf),
            ),
        )

    def _decode_attributes(self, began_s: float) -> dict[str, AttributeValue | None]:
        timeline = self._timeline
        # The first token arrived with the KV or was sampled by the last chunk.
        num_given_before = timeline.num_given_before or 0
        num_tokens = max(0, timeline.num_output_tokens - num_given_before - 1)
        took_s = self._end.at_s - began_s
        return {
            names.TOKENS: num_tokens,
            names.STEPS: timeline.num_steps,
            names.PREEMPTIONS: len(timeline.preempted_s),
            names.TIME_PER_TOKEN: took_s / num_tokens if num_tokens else None,
        }

    # --- all ------------------------------------------------------------------------------

    def _batch_wait(self, name: str, began_s: float) -> Span:
        starts = [start for start in self._timeline.starts if start.at_s >= began_s]
        end = End(starts[0].at_s) if starts else self._end
        return self._wait(name, began_s, end, "batch")

    def _wait(self, name: str, began_s: float, end: End, wait_for: str) -> Span:
        return self._make.span(
            name,
            self._server_id,
            began_s,
            end,
            {names.WAIT_FOR: wait_for},
            events=self._fetched(began_s, end.at_s),
            span_id=child_id(self._server_id, f"{name}/{wait_for}"),
        )

    def _fetched(self, from_s: float, until_s: float) -> tuple[SpanEvent, ...]:
        """Return loads and pulls that began in this time; the request waited for them."""
        pulls = [one for one in self._timeline.pulls if from_s <= one.began_s < until_s]
        loads = [one for one in self._timeline.loads if from_s <= one.began_s < until_s]
        events = [self._pull(pull) for pull in pulls]
        events += [event for load in loads for event in self._load(load)]
        return tuple(events)

    def _pull(self, pull: TransferRecord) -> SpanEvent:
        """A run of blocks that was pulled from another node."""
        return self._make.event(
            names.KV_PULL,
            pull.began_s,
            **{
                names.KV_BLOCKS: pull.num_blocks,
                names.KV_BYTES: pull.num_bytes,
                names.KV_PEER: pull.peer or "",
                names.KV_OUTCOME: pull.outcome,
                names.KV_DURATION: (pull.ended_s or pull.began_s) - pull.began_s,
            },
        )

    def _load(self, load: KvLoad) -> Iterator[SpanEvent]:
        """Yield an event for each tier that the blocks of a load came from."""
        ended_s = self._end.at_s if load.ended_s is None else load.ended_s
        lost = "unfinished" if load.ended_s is None else "lost"
        for tier, num_blocks in load.num_blocks_by_tier.items():
            attributes: dict[str, AttributeValue] = {
                names.KV_TIER: tier,
                names.KV_BLOCKS: num_blocks,
                names.KV_BYTES: num_blocks * self._timeline.facts.block_bytes,
                names.KV_OUTCOME: "done" if tier else lost,
                names.KV_DURATION: ended_s - load.began_s,
            }
            yield self._make.event(names.KV_LOAD, load.began_s, **attributes)

    def _kv(
        self,
        name: str,
        record: TransferRecord,
        *,
        span_id: int | None = None,
        links: tuple[int, ...] = (),
    ) -> Span:
        return self._make.span(
            name,
            self._server_id,
            record.began_s,
            _end_of(record, self._end.at_s),
            self._kv_attributes(record),
            span_id=span_id,
            links=links,
        )

    def _kv_attributes(self, record: TransferRecord) -> dict[str, AttributeValue | None]:
        attributes: dict[str, AttributeValue | None] = {
            names.KV_BYTES: record.num_bytes,
            names.KV_BLOCKS: record.num_blocks,
            names.KV_TRANSPORT: record.transport,
            names.KV_CONVERSION: record.conversion or None,
            names.KV_PEER: record.peer,
            names.KV_VERIFIED: self._timeline.facts.verifies_kv,
        }
        if record.role is TransferRole.SENT:
            attributes |= {
                names.KV_DESCRIPTORS: record.num_descriptors,
                names.KV_WRITES: record.num_writes,
                names.KV_RATE: record.gigabytes_per_s,
                names.KV_OVERLAP: record.overlap,
            }
        return attributes

    def _preemptions(self) -> tuple[SpanEvent, ...]:
        return tuple(self._make.event(names.PREEMPTED, at_s) for at_s in self._timeline.preempted_s)


def _end_of(record: TransferRecord, call_ended_s: float) -> End:
    ended_s = record.ended_s or call_ended_s
    if record.outcome in DONE:
        return End(ended_s)
    if record.outcome in WITHDRAWN:
        return End(ended_s, SpanOutcome.CANCELLED, message=record.outcome)
    return End(ended_s, SpanOutcome.FAILED, "KV_LOST", record.outcome)


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """Timeline of one engine step, and the span made from it. Pure."""

    context: TraceContext
    facts: NodeFacts
    times_s: tuple[float, ...]  # begin, and the end of each part of `names.STEP_PARTS`
    number: int
    num_rows: int
    num_prefill_tokens: int
    num_decode_tokens: int
    requests: tuple[TraceContext, ...]  # traced requests in the step, up to the limit of links
    num_links_left_out: int = 0
    collectives_s: float = 0.0  # of its pass; 0: the node is one process

    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]:
        """Return the span of an ended step."""
        span = SpanMaker(self.context.trace_id, self.facts.role, to_unix_ns).span(
            names.ENGINE_STEP,
            None,
            self.times_s[0],
            End(self.times_s[-1]),
            self._attributes(),
            span_id=self.context.span_id,
        )
        links = tuple(SpanLink(context.trace_id, context.span_id) for context in self.requests)
        return [replace(span, links=links)]

    def _attributes(self) -> dict[str, AttributeValue | None]:
        return {
            names.NODE: self.facts.node_id,
            names.INCARNATION: self.facts.incarnation,
            names.STEP_NUMBER: self.number,
            names.STEP_ROWS: self.num_rows,
            names.STEP_PREFILL_TOKENS: self.num_prefill_tokens,
            names.STEP_DECODE_TOKENS: self.num_decode_tokens,
            names.STEP_LINKS_LEFT_OUT: self.num_links_left_out or None,
            names.COLLECTIVES_S: self.collectives_s or None,
            **dict(zip(names.STEP_PARTS, self._parts_s(), strict=True)),
        }

    def _parts_s(self) -> list[float]:
        return [end_s - began_s for began_s, end_s in pairwise(self.times_s)]
