"""A process's metrics as Prometheus reads them, for whoever has an HTTP server already."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The body, and its content type: OpenMetrics for those who accept it."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
