"""Legs that a node offers, and the change from one kind to another."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from baton.core.legs import LegKind, Legs
from baton.node.legs import OfferedLegs
from baton.rpc.errors import Draining, UnsupportedInput
from tests.support.waits import until

ENCODE, PREFILL, DECODE = LegKind
PATIENCE_S = 30.0


class Node:
    """Offered legs, and all that they were."""

    def __init__(self, *offered: LegKind) -> None:
        self.legs = OfferedLegs(offered, self._note)
        self.seen: list[Legs] = []
        self.may_end = asyncio.Event()

    def _note(self) -> None:
        self.seen.append(self.legs.offered)

    async def serve(self, kind: LegKind) -> str:
        with self.legs.serving(kind):
            await self.may_end.wait()
        return "answer"

    def start(self, kind: LegKind) -> asyncio.Task[str]:
        return asyncio.ensure_future(self.serve(kind))


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_legs_in_progress_end_before_others_are_offered() -> None:
    async def scenario() -> None:
        node = Node(PREFILL)
        prefill = node.start(PREFILL)
        change = asyncio.ensure_future(node.legs.change([DECODE], PATIENCE_S))
        await until(lambda: node.seen == [()])
        for kind in LegKind:
            with pytest.raises(Draining, match=f"no {kind.value} legs"):
                await node.serve(kind)
        node.may_end.set()

        assert await prefill == "answer"
        assert await change == (DECODE,)
        assert node.seen == [(), (DECODE,)]
        assert await node.serve(DECODE) == "answer"

    run(scenario)


def test_legs_that_last_longer_than_the_drain_go_on_elsewhere() -> None:
    async def scenario() -> None:
        node = Node(DECODE, ENCODE)
        moved, encode = [node.start(DECODE) for _ in range(3)], node.start(ENCODE)
        await asyncio.sleep(0)

        assert await node.legs.change([PREFILL], 0.0) == (ENCODE, PREFILL)

        for task in moved:
            with pytest.raises(Draining, match="no decode legs any more"):
                await task
        assert not encode.done()  # a node goes on to encode
        node.may_end.set()
        assert await encode == "answer"

    run(scenario)


def test_legs_that_are_kept_are_not_disturbed() -> None:
    async def scenario() -> None:
        node = Node(PREFILL)
        prefill = node.start(PREFILL)
        await asyncio.sleep(0)

        assert await node.legs.change([PREFILL, DECODE], 0.0) == (PREFILL, DECODE)
        assert await node.legs.change([PREFILL], 0.0) == (PREFILL,)

        assert not prefill.done()
        node.may_end.set()
        assert await prefill == "answer"

    run(scenario)


def test_changes_follow_each_other() -> None:
    async def scenario() -> None:
        node = Node(PREFILL)
        node.start(PREFILL)
        await asyncio.sleep(0)
        there = asyncio.ensure_future(node.legs.change([DECODE], PATIENCE_S))
        back = asyncio.ensure_future(node.legs.change([PREFILL], PATIENCE_S))
        await until(lambda: node.seen == [()])
        node.may_end.set()

        assert await there == (DECODE,)
        assert await back == (PREFILL,)
        assert node.seen == [(), (DECODE,), (), (PREFILL,)]

    run(scenario)


def test_a_change_goes_on_when_its_caller_leaves() -> None:
    async def scenario() -> None:
        node = Node(PREFILL)
        node.start(PREFILL)
        await asyncio.sleep(0)
        change = asyncio.ensure_future(node.legs.change([DECODE], PATIENCE_S))
        await until(lambda: node.seen == [()])
        change.cancel()
        node.may_end.set()

        await until(lambda: node.legs.offered == (DECODE,))
        assert change.cancelled()

    run(scenario)


def test_a_leg_that_its_router_cancels_during_a_change_stays_cancelled() -> None:
    async def scenario() -> None:
        node = Node(DECODE)
        decode = node.start(DECODE)
        change = asyncio.ensure_future(node.legs.change([PREFILL], PATIENCE_S))
        await until(lambda: node.seen == [()])
        decode.cancel()

        assert await change == (PREFILL,)
        assert decode.cancelled()

    run(scenario)


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_a_drain_without_a_sensible_end_is_refused(seconds: float) -> None:
    async def scenario() -> None:
        node = Node(PREFILL)
        with pytest.raises(UnsupportedInput, match="must be from 0 to 86400"):
            await node.legs.change([DECODE], seconds)
        assert node.seen == []

    run(scenario)


@pytest.mark.parametrize(
    ("offered", "wanted", "match"),
    [
        ((PREFILL,), (), "name prefill legs, decode legs or both"),
        ((PREFILL,), (ENCODE,), "name prefill legs, decode legs or both"),
        ((ENCODE,), (DECODE,), "generates no text"),
    ],
)
def test_what_a_node_cannot_offer_is_refused(offered: Legs, wanted: Legs, match: str) -> None:
    async def scenario() -> None:
        node = Node(*offered)
        with pytest.raises(UnsupportedInput, match=match):
            await node.legs.change(wanted, 0.0)
        assert node.legs.offered == offered

    run(scenario)
