"""Prompts that vLLM servers compute for decode nodes.

Failures cost time, and then the decode node computes the prompt: nothing raises.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from baton.core.legs import LegKind
from baton.core.request import GENERATE
from baton.router.dispatch.foreign_prefills import ComputedKv
from baton.router.dispatch.node_rpcs import NodeCalls
from baton.router.dispatch.vllm.http_api import RequestRefused, ServerFailed, ask, kv_of
from baton.router.dispatch.vllm.monitor import monitoring
from baton.router.dispatch.vllm.servers import PrefillServer, PrefillServers
from baton.router.input_processing.model_profiles import ModelProfiles
from baton.router.request_scope import RequestContext
from baton.router.tracing import UNTRACED, RequestTrace
from baton.router.values import GenerateCall
from baton.rpc.node_info import NodeStatus

log = logging.getLogger(__name__)

MIN_TOKENS = 64  # of a prompt; shorter ones are computed sooner than asked for
PREFILL_S = 120.0


class VllmPrefills:
    """Implements `ForeignPrefills`."""

    def __init__(self, servers: PrefillServers, clock: Callable[[], float]) -> None:
        self.servers = servers
        self._clock = clock

    @property
    def has_servers(self) -> bool:
        return bool(self.servers.all)

    async def compute_for(self, call: GenerateCall, context: RequestContext) -> ComputedKv | None:
        if call.foreign_kv is not None or context.placement is not None:
            return None
        is_plain = call.task is GENERATE and not call.model.adapter.id
        is_plain &= not call.token_prompt.media  # they get token ids, and no pictures
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

    def watching(
        self, profiles: ModelProfiles, node_calls: NodeCalls
    ) -> AbstractAsyncContextManager[None]:
        return monitoring(self.servers, profiles, node_calls)

    def report(self) -> tuple[NodeStatus, ...]:
        return self.servers.report()

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


def _earlier(limit_s: float, timeout_s: float | None) -> float:
    return limit_s if timeout_s is None else min(limit_s, timeout_s)
