"""Prometheus exposition of a registry, for processes that already have an HTTP server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return body and content type: OpenMetrics if the client accepts it, else Prometheus text."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
