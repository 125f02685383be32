"""Settings of the dispatch of requests to nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.router.routing.breakers import BreakerConfig
from baton.router.routing.config import Routing


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    max_attempts: int = 3  # consecutive attempts without a new token
    node_patience_s: float = 0.0  # how long a request waits for a decode node
    quarantine_patience_s: float = 10.0  # how long it waits for nodes that are in quarantine
    retry_pause_s: float = 0.2  # before a node that has just failed is tried again
    routing: Routing = field(default_factory=Routing)
    breakers: BreakerConfig = field(default_factory=BreakerConfig)
