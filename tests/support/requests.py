"""Builders of requests with defaults."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import HandoffId, RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.scheduler.request import Request


def make_engine_request(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    request_id: str = "r",
    max_tokens: int = 4,
    prior: Sequence[int] = (),
    send_to: HandoffId | None = None,
    sampling: SamplingParams | None = None,
    priority: int = 0,
    client: str = "",
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(prompt),
        sampling=sampling or SamplingParams(max_tokens=max_tokens),
        seed=0,
        priority=priority,
        client=client,
        prior_output_token_ids=tuple(prior),
        send_to=send_to,
    )


def make_request(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    request_id: str = "r",
    priority: int = 0,
    serial: int = 0,
    max_tokens: int = 4,
    send_to: HandoffId | None = None,
    client: str = "",
) -> Request:
    request = make_engine_request(
        prompt, request_id=request_id, max_tokens=max_tokens, send_to=send_to, client=client
    )
    rank = (priority, 0.0, serial)
    return Request(request, rank, PrefixNaming(16).root(), frozenset(), len(prompt) + max_tokens)


def make_held(prompt: Sequence[int] = (1, 2, 3), *, request_id: str = "r") -> HeldKv:
    """Return the KV, without blocks, of a request with this prompt."""
    return make_request(prompt, request_id=request_id).kv
