"""Main loop of a node: serve, drain on request, finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from engine.errors import EngineStopped
from node.heartbeat import HasHeartbeat, follow_heartbeat
from node.state import NodeState
from rpc.grace_period import ShutdownDeadline
from rpc.server import Running, announce, stop_signal


async def serve_until_drained(
    server: Running,
    state: NodeState,
    engine: HasHeartbeat,
    stuck_after_s: float,
    grace: ShutdownDeadline,
) -> None:
    """Serve until a signal, a drain request or an engine failure; then drain.

    The drain starts the time limit of `grace`, which covers the rest of the process's life.
    Raises EngineStopped if the engine fails.
    """
    async with stop_signal() as stop_requested:
        heartbeat = asyncio.ensure_future(follow_heartbeat(engine, server.health, stuck_after_s))
        following = asyncio.ensure_future(state.follow())
        try:
            announce(state.card.role.value, server.address)
            await _first(
                stop_requested.wait(), state.drain_wanted(), _wait(heartbeat), _wait(following)
            )
            if following.done():
                following.result()  # raises: it ends only by a bug
            grace.begin(lambda: state.num_calls)
            if not heartbeat.done():
                await _drain(server, state, heartbeat)
        finally:
            heartbeat.cancel()
            following.cancel()
    if engine.failure is not None:
        raise EngineStopped(f"the engine failed: {engine.failure!r}")


async def _drain(
    server: Running, state: NodeState, heartbeat: asyncio.Future[BaseException]
) -> None:
    heartbeat.cancel()
    state.drain()
    await server.health.set_ready(False)
    await state.idle()


async def _wait(future: asyncio.Future[Any]) -> None:
    await asyncio.wait([future])


async def _first(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
