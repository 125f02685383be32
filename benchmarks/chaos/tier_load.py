"""Heavy use of the tiers in a chaos run: second turns, a tenant beyond its quota, a slow disk."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from baton.bench.load import FIRST_PLAIN_TOKEN
from baton.client import Answer, AsyncClient, BatonError, Generation, Model
from baton.core.sampling import SamplingParams
from baton.kv_transfer.external_kv import FILE, HOST, KV
from baton.telemetry.metrics import names
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.cluster_config import OPERATOR_TOKEN
from benchmarks.chaos.faults import FaultKind, InjectedFault
from benchmarks.chaos.leaks import Scrape
from benchmarks.chaos.report import TIERS_CPU, WORST
from benchmarks.chaos.second_turns import ProbedTurn
from benchmarks.chaos.tier_threads import tier_threads_s

NUM_LONG, NUM_SHORT = 3, 3  # sessions of a probe
MAX_PROMPT_LEN, SHORT_BLOCKS = 512, 3
ANSWER_TOKENS, NEW_TOKENS = 8, 16
STORED_WITHIN_S = 1.0  # after a first turn: then only the tiers keep its KV
PATIENCE_S = 60.0
NUM_FLOODING = 3
# Of each file on a slow disk, which is not stuck: slower than a tenant, and than all, compute KV.
TENANT_DELAY_S, DELAY_S = 0.02, 0.05
HOST_BLOCKS = f"{WORST}host memory of a node, blocks"
FILLING_S, MEASURED_S = 6.0, 3.0


@dataclass(slots=True)
class _Session:
    salt: str
    prompt: list[int]
    prefix_tokens: int
    began_s: float


class TierLoad:
    """Uses the tiers of all nodes, and notes which second turns were loaded."""

    def __init__(self, cluster: ChaosCluster, client: AsyncClient, seed: int) -> None:
        self._cluster = cluster
        self._client = client
        self._draw = random.Random(seed)
        self._numbers = itertools.count()
        self._model: Model | None = None
        self.num_probes = 1  # for each fault
        self.turns: list[ProbedTurn] = []

    async def strike(self, injected: InjectedFault) -> None:
        """Run one kind. Probes may break off during other faults; the evidence tells why."""
        injected.attack = injected.fault.kind.value
        self._model = self._model or await self._client.model()
        before = await self._counters()
        evidence: dict[str, float] = {}
        match injected.fault.kind:
            case FaultKind.LOADS:
                await self._probe_all(injected, evidence)
            case FaultKind.TENANTS:
                with self._slow(TENANT_DELAY_S, evidence):
                    async with self._flood(f"flood {next(self._numbers)}", evidence):
                        await self._probe_all(injected, evidence)
            case _:
                with self._slow(DELAY_S, evidence):
                    await self._fill_host_memory(evidence)
        after = await self._counters()
        gained = {name: after[name] - before.get(name, 0.0) for name in after}
        injected.evidence = evidence | {name: n for name, n in gained.items() if n > 0}

    async def token_bytes(self) -> float:
        """Return the size of a token's KV in a tier; 0 while no node has any."""
        for found in await self._scrapes():
            num_blocks = found.total(names.TIER_BLOCKS, HOST)
            if num_blocks:
                return found.total(names.TIER_BYTES, HOST) / num_blocks / self._cluster.block_size
        return 0.0

    # --- second turns ---------------------------------------------------------------------

    async def _probe_all(self, injected: InjectedFault, evidence: dict[str, float]) -> None:
        """Probe until one probe breaks off."""
        try:
            for _ in range(self.num_probes):
                await self._probe(injected.fault.kind)
        except BatonError as error:
            evidence[f"broken off: {error.reason or error.code.name}"] = 1
        except TimeoutError:
            evidence["broken off: no end in time"] = 1

    async def _probe(self, kind: FaultKind) -> None:
        """Send first turns, clear the KV caches, and send second turns: long and short ones."""
        has_salts = kind is FaultKind.TENANTS
        sessions = [
            await self._first_turn(
                f"tenant {next(self._numbers)}" if has_salts else "", is_long=number % 2 == 0
            )
            for number in range(NUM_LONG + NUM_SHORT)
        ]
        await asyncio.sleep(STORED_WITHIN_S)
        await self._client.reset_prefix_caches((KV,), OPERATOR_TOKEN)
        for session in sessions:
            self.turns.append(await self._second_turn(kind, session))

    async def _first_turn(self, salt: str, *, is_long: bool) -> _Session:
        began_s, block_size = time.monotonic(), self._cluster.block_size
        length = self._prompt_len if is_long else SHORT_BLOCKS * block_size + 1
        prompt = self._tokens(length)
        answer, _ = await self._generate(prompt, salt)
        # The KV of an answer's last token is never computed, and prefill nodes lack the answer's.
        prefix_tokens = length // block_size * block_size
        return _Session(salt, [*prompt, *answer.token_ids], prefix_tokens, began_s)

    async def _second_turn(self, kind: FaultKind, session: _Session) -> ProbedTurn:
        prompt = [*session.prompt, *self._tokens(NEW_TOKENS)]
        answer, ttft_s = await self._generate(prompt, session.salt)
        expected, computed_s = await self._generate(prompt, f"computed {next(self._numbers)}")
        num_loaded, num_cached, can_load, node = 0, 0, True, ""
        if answer.finish is not None:
            served = answer.finish.served
            can_load = self._cluster.prefill_has_tiers or not served.is_prefill_remote
            node = served.prefill_node if served.is_prefill_remote else served.decode_node
            num_loaded = sum(served.prompt_tokens_loaded.values())
            num_cached = answer.finish.num_cached_prompt_tokens or 0
        return ProbedTurn(
            kind=kind,
            began_s=session.began_s,
            ended_s=time.monotonic(),
            prompt_tokens=len(prompt),
            prefix_tokens=session.prefix_tokens,
            found_tokens=max(0, num_cached - num_loaded),
            loaded_tokens=num_loaded,
            computed_s=computed_s,
            ttft_s=ttft_s,
            is_right=answer.token_ids == expected.token_ids,
            can_load=can_load,
            node=node,
        )

    async def _generate(self, prompt: Sequence[int], salt: str) -> tuple[Answer, float]:
        """Return the answer and the time to its first token. Raises BatonError and TimeoutError."""
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
        answer, began_s, first_s = Answer(), time.monotonic(), 0.0
        async with asyncio.timeout(PATIENCE_S):
            stream = self._client.stream(prompt, Generation(sampling, cache_salt=salt))
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids and not answer.token_ids:
                        first_s = time.monotonic() - began_s
                    answer.take(chunk)
        return answer, first_s

    @property
    def _prompt_len(self) -> int:
        most = MAX_PROMPT_LEN if self._model is None else self._model.max_sequence_len // 2
        return min(MAX_PROMPT_LEN, most) // self._cluster.block_size * self._cluster.block_size + 1

    def _tokens(self, count: int) -> list[int]:
        last = FIRST_PLAIN_TOKEN + 1 if self._model is None else self._model.vocab_size
        return self._draw.choices(range(FIRST_PLAIN_TOKEN, last), k=count)

    # --- floods -----------------------------------------------------------------------------

    @asynccontextmanager
    async def _flood(self, salt: str | None, evidence: dict[str, float]) -> AsyncIterator[None]:
        """Store long prompts of one tenant, or of none, within the block."""
        evidence["tokens of the flood"] = 0

        async def send() -> None:
            while True:
                prompt = self._tokens(self._prompt_len)
                with suppress(BatonError, TimeoutError):
                    await self._generate(prompt, salt or "")
                    evidence["tokens of the flood"] += len(prompt)

        clients = [asyncio.ensure_future(send()) for _ in range(NUM_FLOODING)]
        try:
            yield
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    @contextmanager
    def _slow(self, delay_s: float, evidence: dict[str, float]) -> Iterator[None]:
        disk = self._cluster.slow_disk
        if disk is None:
            yield
            return
        num_delayed = disk.num_delayed
        with disk.slow(delay_s):
            yield
        evidence["files delayed"] = disk.num_delayed - num_delayed

    async def _fill_host_memory(self, evidence: dict[str, float]) -> None:
        """Fill host memory with blocks that the disk lacks, then measure the tiers' threads."""
        async with self._flood(None, evidence):
            await asyncio.sleep(FILLING_S)
        before, began_s = self._threads_s(), time.monotonic()
        await asyncio.sleep(MEASURED_S)
        after, elapsed_s = self._threads_s(), time.monotonic() - began_s
        waiting = [one.total(names.TIER_BLOCKS, HOST) for one in await self._scrapes()]
        shares = [(after[pid] - before[pid]) / elapsed_s for pid in after.keys() & before.keys()]
        evidence[HOST_BLOCKS] = max(waiting, default=0.0)
        evidence[TIERS_CPU] = max(shares, default=0.0)

    def _threads_s(self) -> dict[int, float]:
        pids = [child.process.pid for child in self._cluster.nodes if child.process.poll() is None]
        return {pid: tier_threads_s(pid) for pid in pids}

    async def _counters(self) -> dict[str, float]:
        """Return counters of the tiers, over the nodes that answer."""
        found = await self._scrapes()
        counters = {
            f"blocks {what}, {tier}": sum(one.total(metric, tier) for one in found)
            for what, metric in (("stored", names.TIER_STORED), ("loaded", names.TIER_LOADED))
            for tier in (HOST, FILE)
        }
        return counters | {
            "blocks evicted, host": sum(one.total(names.TIER_EVICTED, HOST) for one in found)
        }

    async def _scrapes(self) -> list[Scrape]:
        found = await asyncio.gather(
            *(self._cluster.scrape(child) for child in self._cluster.nodes), return_exceptions=True
        )
        return [one for one in found if isinstance(one, Scrape)]
