"""Orders that are repeated on a node that has missed them, while updates wait for their turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from grpc import StatusCode

from baton.core.ids import AdapterRef
from baton.core.legs import LegKind
from baton.router.adapters import restores
from baton.router.adapters.calls import LOAD_TIMEOUT_S, AdapterCalls, Outcome
from baton.router.adapters.restores import NUM_TRIES, AdapterRestores
from baton.router.routing.nodes import Node
from baton.rpc.channel import open_channel
from baton.rpc.node_info import LoadedAdapter, NameOrder, NodeAdapters
from baton.rpc.security.operators import NO_OPERATORS
from baton.rpc.status import RemoteError
from tests.support.node_calls import a_node, a_table

PATIENCE_S = 30
NAMES = ("a", "b", "c")


class SilentCalls(AdapterCalls):
    """Calls of a node that does not answer: each ends by its timeout."""

    def __init__(self) -> None:
        super().__init__(open_channel, NO_OPERATORS)
        self.asked: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
        self.may_time_out = asyncio.Event()

    async def send(
        self,
        node: Node,
        order: NameOrder,
        *,
        can_replace: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> Outcome:
        self.asked.put_nowait((order.name, timeout_s))
        await self.may_time_out.wait()
        return RemoteError(StatusCode.DEADLINE_EXCEEDED, "no answer")


def a_member(name: str) -> Node:
    node = a_node(LegKind.DECODE, name)
    return replace(node, card=replace(node.card, max_loras=2))


def test_a_joining_node_that_does_not_answer_leaves_updates_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restores, "PAUSE_S", 0.0)

    async def join_in_silence() -> list[tuple[str, float]]:
        table, calls, turn = a_table(a_member("d0"), a_member("d1")), SilentCalls(), asyncio.Lock()
        known = [AdapterRef(name, name, name) for name in NAMES]
        table.note_adapters(
            "d0:1", NodeAdapters(tuple(LoadedAdapter(one, generation=2) for one in known))
        )
        table.note_adapters("d1:1", NodeAdapters())
        AdapterRestores(table, calls, turn).handle_reports()

        asked = [await calls.asked.get()]
        update = asyncio.ensure_future(turn.acquire())
        calls.may_time_out.set()
        await update  # after one call, not after those of all names
        assert calls.asked.empty()
        turn.release()
        asked += [await calls.asked.get() for _ in range(NUM_TRIES - 1)]
        async with turn:
            assert calls.asked.empty()
        return asked

    asked = asyncio.run(asyncio.wait_for(join_in_silence(), PATIENCE_S))

    assert asked == [(asked[0][0], restores.TIMEOUT_S)] * NUM_TRIES
    assert restores.TIMEOUT_S < LOAD_TIMEOUT_S
