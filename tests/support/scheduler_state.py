"""Work that a scheduler still waits for, read from its state."""

from __future__ import annotations

from baton.engine.scheduler.scheduler import Scheduler


def awaits_peers(scheduler: Scheduler) -> bool:
    """Return whether hand-offs or pulls are in progress."""
    arrivals = scheduler._state.arrivals
    return bool(arrivals.receives or arrivals.sends)


def is_idle(scheduler: Scheduler) -> bool:
    """Return whether there are no requests, hand-offs or pending outputs: every block is free."""
    arrivals = scheduler._state.arrivals
    is_waiting = awaits_peers(scheduler) or arrivals.loads or arrivals.stores
    return not (scheduler.has_work or is_waiting or scheduler.request_ids())
