"""Settings of the dispatch of requests to nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from baton.core.options import NETWORK, Option, check_options
from baton.router.dispatch.retries import BreakerConfig
from baton.router.routing.config import Routing


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    max_attempts: int = 3  # consecutive attempts without a new token
    node_patience_s: Annotated[
        float,
        Option(
            "Seconds that a request waits for a decode node if there is none; 0: fail at once.",
            NETWORK,
            default=5.0,
            at_least=0,
            is_setting=True,
        ),
    ] = 0.0
    quarantine_patience_s: float = 10.0  # how long it waits for nodes that are in quarantine
    retry_pause_s: float = 0.2  # before a node that has just failed is tried again
    routing: Routing = field(default_factory=Routing)
    breakers: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        check_options(self)
