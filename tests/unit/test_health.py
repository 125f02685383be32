"""Readiness as it is told to those who watch."""

from __future__ import annotations

import asyncio

from serving.health import Health
from serving.heartbeat import LONGEST_STEP_S, follow_heartbeat

PATIENCE_S = 30


def test_every_watcher_hears_of_every_change_also_after_another_one_left() -> None:
    async def scene() -> None:
        health = Health(("a.Service",))
        stays, leaves = health.changes(), health.changes()
        assert [await anext(stays), await anext(leaves)] == [False, False]
        await leaves.aclose()

        await health.set_ready(True)
        assert await anext(stays) is True
        await health.set_ready(False)
        assert await anext(stays) is False

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


class Heart:
    def __init__(self, *, since_last_beat_s: float = 0.0) -> None:
        self.failure: BaseException | None = None
        self._since_last_beat_s = since_last_beat_s

    def since_last_beat_s(self) -> float:
        return self._since_last_beat_s


def test_a_stuck_engine_is_not_ready() -> None:
    async def scene() -> None:
        health = Health(())
        await health.set_ready(True)
        changes = health.changes()
        assert await anext(changes) is True
        following = asyncio.ensure_future(
            follow_heartbeat(Heart(since_last_beat_s=LONGEST_STEP_S + 1), health)
        )

        assert await anext(changes) is False

        following.cancel()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_the_end_of_the_engine_is_told_and_nothing_is_ready_any_more() -> None:
    async def scene() -> None:
        health, heart = Health(()), Heart()
        await health.set_ready(True)
        heart.failure = ZeroDivisionError("a bug")

        assert await follow_heartbeat(heart, health) is heart.failure
        assert not health.is_ready

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
