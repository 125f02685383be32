"""Export of stored spans to an OTLP collector."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing

from baton.core.errors import NamedError
from baton.telemetry.tracing.otlp import OtlpExport, readable, resource_of
from baton.telemetry.tracing.otlp_json import ExportedSpan
from baton.telemetry.tracing.outlet import ExportFailed
from baton.telemetry.tracing.spans import AttributeValue

MAX_BATCH = 512

ResourceKey = tuple[tuple[str, AttributeValue], ...]


class CollectorUnreachable(NamedError):
    """The collector did not accept the spans."""


def send_all(endpoint: str, spans: Sequence[ExportedSpan]) -> int:
    """Send all spans and return their number. Raises CollectorUnreachable."""
    by_resource: dict[ResourceKey, list[ExportedSpan]] = defaultdict(list)
    for span in spans:
        by_resource[tuple(sorted(span.resource.items()))].append(span)
    with closing(OtlpExport(endpoint)) as otlp:
        for key, group in by_resource.items():
            resource = resource_of(dict(key))
            for first in range(0, len(group), MAX_BATCH):
                batch = group[first : first + MAX_BATCH]
                try:
                    otlp.send(readable(exported.span, resource) for exported in batch)
                except ExportFailed as error:
                    raise CollectorUnreachable(f"{endpoint}: {error}") from error
    return len(spans)
