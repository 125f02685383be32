"""Processes of hostile client and bystander in a chaos run, and their reports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from benchmarks.chaos.hostile.bystander import STREAMS, ObservedWait
from benchmarks.chaos.hostile.client import AttackTarget
from benchmarks.chaos.hostile.requests import Attack, attacks

ATTACK_LIMIT_S = 12.0
# A process that reports no outcomes for so long is considered stuck.
ANSWER_PATIENCE_S = 60.0
END_PATIENCE_S = 5.0


class HostileProcesses:
    """Runs both processes within `async with`; one attack at a time."""

    def __init__(
        self, target: AttackTarget, seed: int, chosen: Sequence[Attack] = tuple(Attack)
    ) -> None:
        self._target = target
        self._attacks = attacks(seed, chosen)
        self._num_attacks = 0
        self._seed = seed
        self._watching: asyncio.Task[None] | None = None
        self._streams = asyncio.Event()  # the bystander has measured a gap
        self.waits: list[ObservedWait] = []
        self.counts: dict[str, int] = {}  # of waits, including short ones

    async def __aenter__(self) -> HostileProcesses:
        parent = ("--parent-pid", str(os.getpid()))
        self._client = await _start("benchmarks.chaos.hostile.client", *parent)
        addresses = ("--router", self._target.grpc, "--http", self._target.http)
        self._bystander = await _start("benchmarks.chaos.hostile.bystander", *addresses, *parent)
        self._watching = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.timeout(ANSWER_PATIENCE_S):
                await self._streams.wait()
        except BaseException:
            await self.end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.end()

    async def end(self) -> None:
        """End both processes; the counts of the bystander are complete then."""
        for process in (self._client, self._bystander):
            await _end(process)
        if self._watching is not None:
            await self._watching

    async def attack(self) -> tuple[Attack, Counter[str]]:
        """Run the next attack and return it with the number of requests by outcome."""
        attack = next(self._attacks)
        self._num_attacks += 1
        order = {
            "attack": attack.value,
            "seed": self._seed + self._num_attacks,
            "limit_s": ATTACK_LIMIT_S,
            "target": asdict(self._target),
        }
        to_client, from_client = self._client.stdin, self._client.stdout
        if to_client is None or from_client is None:
            raise RuntimeError("the hostile client has no pipes")
        to_client.write(json.dumps(order).encode() + b"\n")
        async with asyncio.timeout(ANSWER_PATIENCE_S):
            outcomes = json.loads(await from_client.readline())
        return attack, Counter(outcomes)

    async def _watch(self) -> None:
        async for report in _lines(self._bystander):
            if STREAMS in report:
                self._streams.set()
            elif "counts" in report:
                self.counts = report["counts"]
            else:
                self.waits.append(ObservedWait(**report))


async def _start(module: str, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
    )


async def _lines(process: Process) -> AsyncIterator[dict[str, Any]]:
    if process.stdout is not None:
        async for line in process.stdout:
            yield json.loads(line)


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(END_PATIENCE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
