"""Settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.scheduler.config import SchedulerConfig

# Interval of steps while idle, so that time-outs are checked and the heartbeat stays fresh.
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """User settings of the engine. Settings that depend on the model are filled in."""

    scheduling: SchedulerConfig = field(default_factory=SchedulerConfig)
    enable_prefix_caching: bool = True
    collect_kv_events: bool = False
    collect_token_ids: bool = False  # in KV events
