"""Prompts that vLLM servers compute for decode nodes.

Failures cost time, and then the decode node computes the prompt: nothing raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import ForeignKv, foreign_kv_from
from baton.core.legs import LegKind
from baton.core.task import GENERATE
from baton.router.context import RequestContext
from baton.router.dispatch.vllm.http_api import RequestRefused, ServerFailed, VllmApi
from baton.router.dispatch.vllm.servers import PrefillServer, PrefillServers
from baton.router.tracing import UNTRACED, RequestTrace
from baton.router.values import GenerateCall

log = logging.getLogger(__name__)

MIN_TOKENS = 64  # of a prompt; shorter ones are computed sooner than asked for
PREFILL_S = 120.0
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class ComputedKv:
    """KV of a prompt on a server."""

    kv: ForeignKv
    server: str
    answered_s: float  # when its lease had just begun
    readers: frozenset[str]  # addresses of the decode nodes that can use it

    def aged(self, now: float) -> ForeignKv:
        return replace(self.kv, age_s=now - self.answered_s)


class VllmPrefills:
    def __init__(self, servers: PrefillServers, clock: Callable[[], float]) -> None:
        self.servers = servers
        self._clock = clock

    async def compute_for(self, call: GenerateCall, context: RequestContext) -> ComputedKv | None:
        """Let a server compute the prompt of a call, if no prefill node of the model can."""
        if call.foreign_kv is not None or context.placement is not None:
            return None
        is_plain = call.task is GENERATE and not call.model.adapter.id
        if not is_plain or call.sampling.prompt_logprobs is not None:
            return None
        base, table = call.model.base, self.servers.table
        prefills = table.open_nodes(LegKind.PREFILL)
        is_known = not table.models or base in table.models
        if not is_known or any(base in ("", node.card.model) for node in prefills):
            return None
        if len(call.prompt_token_ids) < MIN_TOKENS:
            return None
        timeout_s = context.remaining_s(self._clock())
        return await self.compute(base, call.prompt_token_ids, timeout_s, context.trace)

    async def compute(
        self,
        model: str,
        token_ids: Sequence[int],
        timeout_s: float | None,
        trace: RequestTrace = UNTRACED,
    ) -> ComputedKv | None:
        """Let the best server compute a prompt. None: none has, within the time."""
        for server in self.servers.choose(model, len(token_ids)):
            try:
                with self._sent(server, len(token_ids)), trace.vllm_leg(server.address) as leg:
                    async with _limited(server, _earlier(PREFILL_S, timeout_s)):
                        computed = await self._compute_on(
                            server, model, token_ids, dict(leg.metadata)
                        )
            except RequestRefused as refusal:
                log.info("%s has refused a prompt: %s", server.address, refusal)
                self.servers.note_success(server)
                return None
            except (ServerFailed, OSError, TimeoutError) as error:
                log.warning("%s has not computed a prompt: %r", server.address, error)
                self.servers.note_failure(server, str(error) or server.trouble or repr(error))
            else:
                self.servers.note_success(server)
                return computed
        return None

    @contextmanager
    def _sent(self, server: PrefillServer, num_tokens: int) -> Iterator[None]:
        """Account for a prompt on the server until the end of the block."""
        self.servers.note_sent(server)
        server.num_tokens += num_tokens
        server.num_sent += 1
        try:
            yield
        finally:
            server.num_tokens -= num_tokens
            server.num_sent -= 1

    async def _compute_on(
        self, server: PrefillServer, model: str, token_ids: Sequence[int], headers: dict[str, str]
    ) -> ComputedKv:
        answer = await ask(server.api, server.model, token_ids, headers)
        began_s = self._clock()
        kv = kv_of(answer)
        if kv.engine_id != server.engine_id:
            server.note_gone("it has restarted, and its weights are not checked yet")
            raise ServerFailed(server.trouble)
        return ComputedKv(kv, server.address, began_s, self.servers.readers(server, model))


@asynccontextmanager
async def _limited(server: PrefillServer, limit_s: float) -> AsyncIterator[None]:
    """Raise TimeoutError in the block after `limit_s`, or as soon as the server is gone."""
    async with asyncio.timeout(limit_s) as timer:
        server.timers.add(timer)
        try:
            yield
        finally:
            server.timers.discard(timer)


async def ask(
    api: VllmApi,
    model: str,
    token_ids: Sequence[int],
    headers: Mapping[str, str] = {},
    **more: object,
) -> Mapping[str, Any]:
    """Have a server compute a prompt and hold its KV. Raises ServerFailed and OSError."""
    body = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "stream": False,
        "kv_transfer_params": ASK,
        **more,
    }
    return await api.post(COMPLETIONS, body, headers)


def kv_of(answer: Mapping[str, Any]) -> ForeignKv:
    """Return the KV that an answer names. Raises ServerFailed."""
    try:
        params = answer.get("kv_transfer_params")
        kv = foreign_kv_from(params if isinstance(params, dict) else None)
    except InvalidRequest as error:
        raise ServerFailed(str(error)) from None
    if kv is None:
        raise ServerFailed("its answer names no KV; start it with NixlConnector")
    return kv


def _earlier(limit_s: float, timeout_s: float | None) -> float:
    return limit_s if timeout_s is None else min(limit_s, timeout_s)
