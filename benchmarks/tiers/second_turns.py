"""Second turns of sessions whose KV was evicted, while other requests decode on the same node.

Sessions are long or short: loads of one block follow the stores of many.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from baton.bench.load import FIRST_PLAIN_TOKEN
from baton.client import Answer, AsyncClient, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from benchmarks.tiers.turns import SecondTurn, Turn, TurnsRow, turn_order, turns_row

HOST, FILE = "host", "file"
ANSWER_TOKENS, NEW_TOKENS = 2, 32  # of a first turn, and what a second one adds
SHORT_BLOCKS = 1.5  # of the first prompt of a short session, of which one is a whole block
STREAM_PROMPT, STREAM_TOKENS = 32, 256


@dataclass(frozen=True, slots=True)
class TurnsBench:
    cluster: ClusterOptions  # model and arguments of its node
    host_memory: str
    small_host_memory: str  # in front of files
    block_size: int
    num_tokens: int
    num_long: int
    num_streams: int


@dataclass(frozen=True, slots=True)
class TurnsResult:
    row: TurnsRow
    seconds: Sequence[SecondTurn]


def run(bench: TurnsBench) -> Iterator[TurnsResult]:
    """Replay the sessions with host memory alone, and with files behind little of it."""
    for tier in (HOST, FILE):
        with _cluster(bench, tier) as cluster:
            replay = asyncio.run(_replay(bench, cluster.address))
        yield TurnsResult(turns_row(tier, replay.seconds, replay.gaps_s), replay.seconds)


@contextmanager
def _cluster(bench: TurnsBench, tier: str) -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory() as folder:
        host = ("--kv-host-memory", bench.host_memory)
        files = ("--kv-folder", folder, "--kv-folder-size", "64GiB")
        behind = ("--kv-host-memory", bench.small_host_memory, *files)
        options = ClusterOptions(
            bench.cluster.model,
            num_prefill=0,
            num_decode=1,
            is_colocated=True,
            node_arguments=(*bench.cluster.node_arguments, *(host if tier == HOST else behind)),
            router_arguments=("--trace-dir", "off"),
        )
        with LocalCluster(options) as cluster:
            yield cluster


@dataclass(slots=True)
class _Session:
    prompt: list[int]
    first_s: float = 0.0  # to the first token of the first turn
    prefix_tokens: int = 0


@dataclass(slots=True)
class _Replay:
    bench: TurnsBench
    client: AsyncClient
    vocabulary: range
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    sessions: dict[tuple[int, bool], _Session] = field(default_factory=dict)
    seconds: list[SecondTurn] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def tokens(self, count: int) -> list[int]:
        return self.draw.choices(self.vocabulary, k=count)

    async def run(self, turn: Turn) -> None:
        key = turn.session, turn.is_long
        if turn.is_second:
            await self._run_second(self.sessions.pop(key), is_long=turn.is_long)
            return
        short = int(SHORT_BLOCKS * self.bench.block_size)
        self.sessions[key] = await self._run_first(self.bench.num_tokens if turn.is_long else short)

    async def _run_first(self, length: int) -> _Session:
        block_size = self.bench.block_size
        session = _Session(self.tokens(length))
        answer, session.first_s = await self._generate(session.prompt)
        # The KV of an answer's last token is never computed.
        computed = length + len(answer.token_ids) - 1
        session.prefix_tokens = computed // block_size * block_size
        session.prompt += answer.token_ids
        return session

    async def _run_second(self, session: _Session, *, is_long: bool) -> None:
        answer, ttft_s = await self._generate([*session.prompt, *self.tokens(NEW_TOKENS)])
        if answer.finish is None:
            raise RuntimeError("the answer has no end")
        num_loaded = sum(answer.finish.served.prompt_tokens_loaded.values())
        num_cached = answer.finish.num_cached_prompt_tokens or 0
        self.seconds.append(
            SecondTurn(
                is_long=is_long,
                prefix_tokens=session.prefix_tokens,
                found_tokens=max(0, num_cached - num_loaded),
                loaded_tokens=num_loaded,
                computed_s=session.first_s,
                ttft_s=ttft_s,
            )
        )

    async def _generate(self, prompt: Sequence[int]) -> tuple[Answer, float]:
        """Return the answer and the time to its first token."""
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        answer, began_s, first_s = Answer(), time.monotonic(), 0.0
        async for chunk in self.client.stream(prompt, Generation(sampling)):
            if chunk.token_ids and not answer.token_ids:
                first_s = time.monotonic() - began_s
            answer.take(chunk)
        return answer, first_s

    async def decode(self) -> None:
        """Decode one answer after the other, and note the gaps between their tokens."""
        sampling = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True)
        while True:
            last_s: float | None = None
            async for chunk in self.client.stream(self.tokens(STREAM_PROMPT), Generation(sampling)):
                now_s = time.monotonic()
                if chunk.token_ids:
                    if last_s is not None:
                        self.gaps_s.append(now_s - last_s)
                    last_s = now_s


async def _replay(bench: TurnsBench, address: str) -> _Replay:
    async with AsyncClient(address) as client:
        vocabulary = range(FIRST_PLAIN_TOKEN, (await client.model()).vocab_size)
        replay = _Replay(bench, client, vocabulary)
        async with _decoding(replay):
            for turn in turn_order(bench.num_long):
                await replay.run(turn)
        return replay


@asynccontextmanager
async def _decoding(replay: _Replay) -> AsyncIterator[None]:
    """Decode within the block. A failed request ends it."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(replay.decode()) for _ in range(replay.bench.num_streams)]
        yield
        for task in tasks:
            task.cancel()
