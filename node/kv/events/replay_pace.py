"""Pace of all replays of a publisher together, which bounds their share of a core."""

from __future__ import annotations

import asyncio

# A message takes about 30 us.
MESSAGE_EVERY_S = 0.0001
# Replays that come after a pause may send so much without waiting.
BURST_S = 0.05


class ReplayPace:
    def __init__(self) -> None:
        self._next_s = 0.0

    async def take_turn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._next_s = max(self._next_s, now_s - BURST_S) + MESSAGE_EVERY_S
        await asyncio.sleep(max(0.0, self._next_s - now_s))
