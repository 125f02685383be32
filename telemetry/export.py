"""Sends spans that were kept to a collector."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing

from engine.errors import EngineError
from telemetry.otlp import OtlpExport, readable, resource_of
from telemetry.otlp_json import ToldSpan
from telemetry.outlet import ExportFailed
from telemetry.spans import AttributeValue

MAX_BATCH = 512

ResourceKey = tuple[tuple[str, AttributeValue], ...]


class CollectorUnreachable(EngineError):
    """Nobody took the spans."""


def send_all(endpoint: str, told: Sequence[ToldSpan]) -> int:
    """How many spans were sent. Raises CollectorUnreachable."""
    by_resource: dict[ResourceKey, list[ToldSpan]] = defaultdict(list)
    for one in told:
        by_resource[tuple(sorted(one.resource.items()))].append(one)
    with closing(OtlpExport(endpoint)) as otlp:
        for key, its_spans in by_resource.items():
            resource = resource_of(dict(key))
            for first in range(0, len(its_spans), MAX_BATCH):
                batch = its_spans[first : first + MAX_BATCH]
                try:
                    otlp.send(readable(one.span, resource) for one in batch)
                except ExportFailed as error:
                    raise CollectorUnreachable(f"{endpoint}: {error}") from error
    return len(told)
