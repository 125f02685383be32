"""Loads, replacements and unloads of an adapter that requests use meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable

from baton.client import AsyncClient, BatonError
from baton.rpc.errors import UnknownModel
from baton.rpc.status import reason_of
from benchmarks.chaos.adapted_text import MEANINGS
from benchmarks.chaos.adapter_folders import RELOADED
from benchmarks.chaos.cluster_config import OPERATOR_TOKEN
from benchmarks.chaos.faults import InjectedFault

PATIENCE_S = 30.0  # for one update; a stopped node delays it
NUM_REPLACEMENTS = 3
MAX_UNLOADS = 3


class AdapterReloads:
    """Gives one name to different adapters in turn."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def strike(self, injected: InjectedFault) -> None:
        """Load, replace and unload within the fault's time. Dead nodes make updates fail."""
        done: Counter[str] = Counter()
        pause_s = injected.fault.lasts_s / (1 + NUM_REPLACEMENTS)
        for number in range(1 + NUM_REPLACEMENTS):
            path = MEANINGS[(injected.fault.number + number) % len(MEANINGS)]
            load = self._client.load_adapter(
                RELOADED, path, can_replace=True, operator_token=OPERATOR_TOKEN
            )
            await _note(load, "adapter loads", done)
            await asyncio.sleep(pause_s)
        unload = self._client.unload_adapter(RELOADED, OPERATOR_TOKEN)
        await _note(unload, "adapter unloads", done)
        injected.evidence = done

    async def end(self) -> None:
        """Unload the adapter, which a fault leaves loaded if a node was dead at its end."""
        for _ in range(MAX_UNLOADS):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._client.unload_adapter(RELOADED, OPERATOR_TOKEN)
            except BatonError as error:
                if error.reason == reason_of(UnknownModel):
                    return


async def _note(update: Awaitable[object], what: str, done: Counter[str]) -> None:
    """Count an update, or the reason of its failure."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await update
            done[what] += 1
    except BatonError as error:
        done[f"failed {what}, {error.reason or error.code.name}"] += 1
    except TimeoutError:
        done[f"failed {what}, no end within {PATIENCE_S:.0f} s"] += 1
