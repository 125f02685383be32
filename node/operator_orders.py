"""Orders of operators to a node: pauses, and resets of its prefix cache and the tiers below."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.core.pause_mode import PauseMode
from baton.engine.engine_thread import EngineThread
from baton.engine.errors import EngineStopped
from baton.engine.scheduler.scheduler import Scheduler
from baton.kv_transfer.external_kv import check_tiers
from baton.node.engine_calls import run_on_engine
from baton.node.state import NodeState
from baton.rpc.errors import NotAnOperator
from baton.rpc.security.token import OPTION, Operators

SetPause = Callable[[PauseMode | None], Awaitable[None]]  # None: resume


class ResetPrefixCache(Protocol):
    async def __call__(
        self, tiers: Collection[str], *, reset_running: bool = False
    ) -> dict[str, int]:
        """Clear the tiers of these names, or all. Returns how many blocks each had."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheResets:
    state: NodeState
    reset_prefix_cache: ResetPrefixCache
    operators: Operators
    shared_tiers: frozenset[str]  # of this node, which others use, too

    async def reset(
        self, tiers: Collection[str], shown: str | None, *, reset_running: bool = False
    ) -> dict[str, int]:
        """Clear these tiers, or all. `shown` is the caller's authorization.

        Returns how many blocks each had. Raises NotAnOperator, InvalidRequest and EngineStopped.
        """
        check_tiers(tiers)
        self._check_right(tiers, shown)
        num_blocks = await self.reset_prefix_cache(tiers, reset_running=reset_running)
        self.state.calls.changes.notify()  # routers and subscribers learn of it at once
        return num_blocks

    def _check_right(self, tiers: Collection[str], shown: str | None) -> None:
        """Raises NotAnOperator. Tiers that are shared are deleted for all hosts."""
        self.operators.check(shown)
        shared = self.shared_tiers.intersection(tiers) if tiers else self.shared_tiers
        if shared and not self.operators.is_one(shown):
            raise NotAnOperator(
                f"the KV in these tiers is shared with other nodes: {', '.join(sorted(shared))}. "
                f"Only operators may delete it: start nodes and router with {OPTION}, or reset "
                "only tiers of the nodes themselves (kv, host)"
            )


async def reset_prefix_cache(
    engine: EngineThread,
    scheduler: Scheduler,
    tiers: Collection[str],
    *,
    reset_running: bool = False,
) -> dict[str, int]:
    """Reset the prefix cache on the engine's thread, between steps."""
    if engine.failure is not None:
        raise EngineStopped("the engine of this node has stopped; its cache is gone with it")
    reset = partial(scheduler.reset_prefix_cache, tiers, reset_running=reset_running)
    return await run_on_engine(engine, reset)


async def set_pause(engine: EngineThread, scheduler: Scheduler, mode: PauseMode | None) -> None:
    """Pause, and return when nothing is computed any more, or resume. Raises EngineStopped."""
    if mode is None:
        await run_on_engine(engine, scheduler.resume)
        return
    await run_on_engine(engine, partial(scheduler.pause, mode))
    await asyncio.wrap_future(engine.when(lambda: scheduler.has_paused))
