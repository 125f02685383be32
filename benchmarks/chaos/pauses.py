"""Pauses of a node's scheduler under load, in all modes in turn."""

from __future__ import annotations

import asyncio

from baton.cluster import Child
from baton.core.pause_mode import PauseMode
from baton.rpc.channel import open_channel
from baton.rpc.messages.calls import PAUSE_MODE
from baton.rpc.security.token import authorization
from baton.v1 import node_pb2, node_pb2_grpc
from benchmarks.chaos.cluster_config import OPERATOR_TOKEN
from benchmarks.chaos.faults import InjectedFault

PATIENCE_S = 120.0  # in which the requests in progress end, in mode `wait`
MODES = tuple(PauseMode)


async def pause(injected: InjectedFault, victim: Child) -> None:
    """Pause a node, and resume it after the fault's time."""
    mode = MODES[injected.fault.number % len(MODES)]
    await _set_pause(victim, mode)
    await asyncio.sleep(injected.fault.lasts_s)
    await _set_pause(victim, None)
    injected.evidence = {f"pauses in mode {mode}": 1}


async def _set_pause(victim: Child, mode: PauseMode | None) -> None:
    async with open_channel(victim.address) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        request = node_pb2.SetPauseRequest(mode=PAUSE_MODE.to_message(mode))
        await stub.SetPause(request, timeout=PATIENCE_S, metadata=(authorization(OPERATOR_TOKEN),))
