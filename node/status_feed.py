"""Reads load and KV events from the engine's thread, for one reader with many watchers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.engine_thread import EngineThread
from engine.errors import EngineStopped
from engine.events import KvEvent
from engine.scheduler.scheduler import Scheduler
from rpc.node_info import NodeLoad, NodeTotals


@dataclass(frozen=True, slots=True)
class NodeUpdate:
    """Current load, and changes of the prefix cache since the last read."""

    load: NodeLoad
    kv_events: tuple[KvEvent, ...] = ()


ReadUpdate = Callable[[], Awaitable[NodeUpdate]]
ResetPrefixCache = Callable[[], Awaitable[int]]  # returns the number of blocks that were cached
Answer = TypeVar("Answer")


def update_reader(engine: EngineThread, scheduler: Scheduler) -> ReadUpdate:
    """Return a function that reads between engine steps.

    A read consumes the KV events, so there must be a single reader.
    """
    loop = asyncio.get_running_loop()

    async def read() -> NodeUpdate:
        answer: asyncio.Future[NodeUpdate] = loop.create_future()
        engine.post(lambda: _answer(loop, answer, _news_of(scheduler)))
        return await answer

    return read


def prefix_cache_resetter(engine: EngineThread, scheduler: Scheduler) -> ResetPrefixCache:
    """Return a function that resets the prefix cache on the engine's thread, between steps."""
    loop = asyncio.get_running_loop()

    async def reset() -> int:
        if engine.failure is not None:
            raise EngineStopped("the engine of this node has stopped; its cache is gone with it")
        answer: asyncio.Future[int] = loop.create_future()
        engine.post(lambda: _answer(loop, answer, scheduler.reset_prefix_cache()))
        return await answer

    return reset


def _answer(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Answer], value: Answer) -> None:
    def resolve() -> None:
        if not answer.cancelled():
            answer.set_result(value)

    loop.call_soon_threadsafe(resolve)


def _news_of(scheduler: Scheduler) -> NodeUpdate:
    stats = scheduler.stats()
    num_waiting = stats.num_waiting + stats.num_ready + stats.num_waiting_for_remote_kvs
    num_waiting += stats.num_waiting_for_fsm
    totals = NodeTotals(
        num_prompt_tokens=stats.total_prefix_query_tokens,
        num_hit_tokens=stats.total_prefix_hit_tokens,
        num_sampled_tokens=stats.total_sampled_tokens,
        num_proposed_tokens=stats.total_proposed_tokens,
        num_accepted_tokens=stats.total_accepted_tokens,
    )
    load = NodeLoad(stats.num_running, num_waiting, stats.num_free_blocks, totals=totals)
    return NodeUpdate(load, scheduler.take_kv_events())
