"""Bystander process of a chaos run: streams answers, polls `/live` and reports latencies.

It is a process of its own, since the process that injects faults and checks answers is busy.
Reports are JSON lines on standard output with monotonic times, which all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum

from baton.client import AsyncClient, BatonError, Retries
from baton.client.generation import Generation
from baton.core.sampling import SamplingParams
from baton.rpc.process_end import end_with_parent

NUM_STREAMS = 2
NUM_TOKENS = 200
# Shorter waits are only counted.
REPORTED_S = 0.1
HEALTH_EVERY_S = 0.2
LAG_EVERY_S = 0.02
PATIENCE_S, STREAM_PATIENCE_S = 60.0, 150.0
PAUSE_S = 0.2
STREAMS = "streams"  # report of the first gap


class Wait(Enum):
    GAP = "gap"
    FIRST_TOKEN = "first token"
    HEALTH = "health"
    LAG = "lag"  # event-loop lag of this process
    FAILURE = "failure"  # of a stream or /live, with its reason


@dataclass(frozen=True, slots=True)
class ObservedWait:
    kind: str  # of Wait
    began_s: float
    ended_s: float
    reason: str = ""


class Bystander:
    def __init__(self, router: str, http: str) -> None:
        self._router = router
        self._http = http
        self.counts: dict[str, int] = dict.fromkeys((wait.value for wait in Wait), 0)

    async def run(self, stop: asyncio.Event) -> None:
        async with AsyncClient(self._router, retries=Retries(max_attempts=1)) as client:
            tasks = [asyncio.ensure_future(self._stream(client, n)) for n in range(NUM_STREAMS)]
            tasks += [
                asyncio.ensure_future(one()) for one in (self._poll_health, self._measure_lag)
            ]
            await stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, client: AsyncClient, number: int) -> None:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        for count in itertools.count():
            prompt = (TOKEN + number, *(TOKEN + place for place in _digits(count)))
            last_s, kind = time.monotonic(), Wait.FIRST_TOKEN
            try:
                # A deadline is not sent: the router would refuse requests that may miss it.
                async with asyncio.timeout(STREAM_PATIENCE_S):
                    async for _ in client.stream(prompt, Generation(sampling)):
                        now_s = time.monotonic()
                        self._note(kind, last_s, now_s)
                        last_s, kind = now_s, Wait.GAP
            except TimeoutError:
                self._note(Wait.FAILURE, last_s, time.monotonic(), "an answer hung")
            except BatonError as error:
                self._note(Wait.FAILURE, last_s, time.monotonic(), error.reason or error.code.name)
                await asyncio.sleep(PAUSE_S)

    async def _poll_health(self) -> None:
        host, _, port = self._http.rpartition(":")
        while True:
            began_s = time.monotonic()
            reason = ""
            try:
                async with asyncio.timeout(PATIENCE_S):
                    reading, writing = await asyncio.open_connection(host, int(port))
                    try:
                        writing.write(b"GET /live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                        reply = await reading.read()
                    finally:
                        writing.close()
                if not reply.startswith(b"HTTP/1.1 200"):
                    reason = f"/live: {reply[:20]!r}"
            except (OSError, TimeoutError) as error:
                reason = f"/live: {type(error).__name__}"
            kind = Wait.FAILURE if reason else Wait.HEALTH
            self._note(kind, began_s, time.monotonic(), reason)
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _measure_lag(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            self._note(Wait.LAG, began_s + LAG_EVERY_S, time.monotonic())

    def _note(self, kind: Wait, began_s: float, ended_s: float, reason: str = "") -> None:
        self.counts[kind.value] += 1
        if kind is Wait.GAP and self.counts[kind.value] == 1:
            _report({STREAMS: True})
        if ended_s - began_s >= REPORTED_S or reason:
            _report(asdict(ObservedWait(kind.value, began_s, ended_s, reason)))


TOKEN = 5


def _digits(number: int) -> Iterator[int]:
    """Yield the digits of a number, which make each prompt unique."""
    while number:
        number, digit = divmod(number, 50)
        yield digit


def _report(values: dict[str, object]) -> None:
    print(json.dumps(values), flush=True)


async def watch(router: str, http: str) -> None:
    """Run until SIGTERM, then report the counts."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    bystander = Bystander(router, http)
    await bystander.run(stop)
    _report({"counts": bystander.counts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--http", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    options = parser.parse_args()
    end_with_parent(options.parent_pid)
    asyncio.run(watch(options.router, options.http))


if __name__ == "__main__":
    main()
