"""End of an answer, with its statistics: the same values in the router and for its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.core.output import FinishReason


@dataclass(frozen=True, slots=True)
class Served:
    """Nodes that served a request, and the KV transferred between them."""

    prefill_node: str  # empty: the decode node computed the prompt
    decode_node: str
    is_prefill_remote: bool
    prefill_reason: str  # for a prompt that no prefill node computed; else empty
    kv_bytes: int
    kv_blocks: int
    kv_transport: str
    prompt_tokens_computed_on_decode: int
    prompt_tokens_cached_on_decode: int
    attempts: int
    trace_id: str = ""  # empty: not traced
    tokens_proposed: int = 0  # by speculative decoding on the decode node
    tokens_accepted: int = 0  # of tokens_proposed
    # None without a prefill node, or if its count did not arrive soon after the last token.
    prompt_tokens_cached_on_prefill: int | None = None
    kv_conversion: str = ""  # of the prefill node's KV by the decode node; empty: none
    # Of the cached prompt tokens: loaded from outside the KV cache, by source, such as "host".
    prompt_tokens_loaded: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finish:
    """Last part of an answer that is complete. Times are seconds since the router received it."""

    reason: FinishReason  # STOP or LENGTH
    num_prompt_tokens: int
    num_completion_tokens: int
    dispatched_s: float
    first_token_s: float  # 0: there was none, as with the next one
    first_decoded_token_s: float
    finished_s: float
    served: Served
    stop_token_id: int | None = None
    stop_string: str | None = None
    # Prompt tokens read from the prefix cache of the node that computed the others.
    num_cached_prompt_tokens: int | None = None
    warnings: tuple[str, ...] = ()  # what was done only in part, such as max_tokens lowered
