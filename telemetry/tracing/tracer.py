"""Tracer of a process: samples requests and exports the timelines of ended ones."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from baton.telemetry import names
from baton.telemetry.options import TelemetryOptions
from baton.telemetry.resource import Process
from baton.telemetry.tracing.outlet import BatchExporter, Export, Timeline
from baton.telemetry.tracing.spans import TraceContext, parse_traceparent
from baton.telemetry.tracing.store import TraceWriter

TRACE_BITS, SPAN_BITS = 128, 64

log = logging.getLogger(__name__)

# Names and values of gRPC metadata; values can be binary.
Received = Iterable[tuple[str, str | bytes]]


class Tracer:
    """Sampler and exporter of timelines. Without an outlet, nothing is traced."""

    def __init__(self, ratio: float = 0.0, outlets: tuple[BatchExporter, ...] = ()) -> None:
        self._limit = round(ratio * 2**SPAN_BITS) if outlets else 0
        self._outlets = outlets

    @property
    def is_on(self) -> bool:
        return bool(self._outlets)

    @property
    def num_lost(self) -> int:
        """Number of timelines that were dropped or not exported."""
        return sum(outlet.num_dropped + outlet.num_failed for outlet in self._outlets)

    def take(self, timeline: Timeline) -> None:
        """Export a timeline. Thread-safe, does not block."""
        for outlet in self._outlets:
            outlet.take(timeline)

    def extract_context(self, metadata: Received) -> TraceContext | None:
        """Return the trace context of an incoming call; None if it has none or tracing is off."""
        if not self.is_on:
            return None
        traceparent = dict(metadata).get(names.TRACEPARENT)
        return parse_traceparent(traceparent) if isinstance(traceparent, str) else None

    def draws(self, trace_id: int) -> bool:
        """Return whether to sample a new trace. It depends only on the id, like other samplers."""
        random_bits: int = trace_id & (2**SPAN_BITS - 1)
        return random_bits < self._limit


NO_TRACER = Tracer()


def new_trace_id() -> int:
    return random.getrandbits(TRACE_BITS) or 1


def new_span_id() -> int:
    return random.getrandbits(SPAN_BITS) or 1


@contextmanager
def tracing(options: TelemetryOptions, process: Process) -> Iterator[Tracer]:
    """Set up tracing for the block. At its end, all waiting timelines are exported."""
    with ExitStack() as lifetime:
        outlets = [
            lifetime.enter_context(BatchExporter(name, export, _unix_ns_converter()))
            for name, export in _exports(options, process, lifetime)
        ]
        yield Tracer(options.trace_ratio, tuple(outlets))


def _exports(
    options: TelemetryOptions, process: Process, lifetime: ExitStack
) -> Iterator[tuple[str, Export]]:
    if options.trace_dir is not None:
        try:
            writer = TraceWriter(
                options.trace_dir,
                options.trace_dir_bytes,
                process.attributes,
                f"{process.role}-{process.incarnation}",
            )
            yield str(options.trace_dir), writer.write
        except OSError as error:
            log.warning("no traces are stored in %s: %s", options.trace_dir, error)
    if options.otlp_endpoint:
        # Imported lazily: the import is slow, and most processes have no collector.
        from opentelemetry.sdk.resources import Resource

        from baton.telemetry.tracing.otlp import OtlpExport

        otlp = OtlpExport(options.otlp_endpoint)
        lifetime.callback(otlp.close)
        resource = Resource.create(dict(process.attributes))
        yield options.otlp_endpoint, partial(otlp.send, resource=resource)


def _unix_ns_converter() -> Callable[[float], int]:
    """Return a conversion from monotonic seconds to Unix nanoseconds.

    Its offset is constant, so spans stay consistent if the wall clock is adjusted.
    """
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda at_s: round(at_s * 1e9) + offset_ns
