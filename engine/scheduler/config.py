"""Settings of the scheduler and the KV cache. Validated on construction, immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from baton.core.errors import InvalidConfig
from baton.core.extra_args import Check, reject_extra_args
from baton.core.options import BATCHING, KV_CACHE, Option, check_options
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.engine.kv_cache.groups import ONE_GROUP, KvGroup
from baton.engine.runner.config import MaxNumSeqs

DEFAULT_LONG_PREFILL_THRESHOLD = 512
LAYER = "layer"


class SchedulingPolicy(Enum):
    """Scheduling order of waiting requests, and reverse order of preemption."""

    FCFS = "fcfs"  # arrival
    PRIORITY = "priority"  # priority (lower is earlier), then arrival


class LoadFailurePolicy(Enum):
    """Handling of requests whose KV did not arrive."""

    RECOMPUTE = "recompute"  # from the start, on this node
    FAIL = "fail"  # end the request here; the router can retry it on another node


def default_threshold(given: Mapping[str, Any]) -> int:
    """Return the default of --long-prefill-token-threshold for these options."""
    return DEFAULT_LONG_PREFILL_THRESHOLD if given.get("chunked_prefill", True) else 0


def default_long_prefills(given: Mapping[str, Any]) -> int | None:
    """Return the default of --max-long-partial-prefills for these options."""
    threshold = given.get("long_prefill_token_threshold")
    return 1 if (default_threshold(given) if threshold is None else threshold) else None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of the KV cache."""

    num_blocks: int
    block_size: int = 16
    groups: tuple[KvGroup, ...] = ONE_GROUP
    num_state_blocks: int = 0  # that hold the recurrent state of one request
    enable_prefix_caching: bool = True
    # Identifies everything the KV of given tokens depends on: weights, dtype, layout.
    model_salt: str = ""
    hash_seed: int = 0
    # Longer prompts share blocks only with prompts of the same length, for models whose KV depends
    # on the prompt length (dynamic rope). None: no limit.
    max_shareable_prompt_len: int | None = None
    collect_events: bool = False  # if set, `take_events` must be called regularly
    collect_token_ids: bool = False  # in these events

    def __post_init__(self) -> None:
        _require("num_blocks", self.num_blocks, self.num_blocks >= 1, "at least 1")
        _require("block_size", self.block_size, self.block_size >= 1, "at least 1")
        if self.num_state_blocks and self.max_blocks_per_group < 1:
            raise InvalidConfig(
                f"num_blocks is {self.num_blocks}; it must be at least "
                f"{self.max_state_blocks + len(self.groups)}: {self.max_state_blocks} for the "
                f"recurrent state of one request, and {len(self.groups)} for its tokens. Start "
                "the node with a larger --kv-cache-memory"
            )

    @property
    def max_state_blocks(self) -> int:
        """The state blocks that one request holds at most.

        It has two sides, and holds the snapshot it continues from until its first pass has ended.
        """
        return self.num_state_blocks * (3 if self.enable_prefix_caching else 2)

    @property
    def max_blocks_per_group(self) -> int:
        """The blocks of tokens that one request can have in each group."""
        return (self.num_blocks - self.max_state_blocks) // len(self.groups)

    @property
    def naming(self) -> PrefixNaming:
        return PrefixNaming(
            self.block_size,
            self.model_salt,
            self.hash_seed,
            self.max_shareable_prompt_len,
            needs_snapshot=self.num_state_blocks > 0,
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler. Names and meanings follow vLLM V1 where it has them."""

    max_num_batched_tokens: Annotated[
        int, Option("Maximum number of tokens in a step.", BATCHING)
    ] = 2048
    max_num_seqs: MaxNumSeqs = 128
    max_model_len: int = 8192
    vocab_size: int | None = None  # None: token ids are not checked
    eos_token_ids: frozenset[int] = frozenset()
    policy: Annotated[
        SchedulingPolicy,
        Option(
            "Order of waiting requests: priority or fcfs. priority orders by the request's "
            "priority (lower first), then by arrival; a waiting request may preempt running ones "
            "of lower priority, each at most once. fcfs orders by arrival alone.",
            BATCHING,
            name="scheduling_policy",
            default=SchedulingPolicy.PRIORITY,
        ),
    ] = SchedulingPolicy.FCFS
    enable_chunked_prefill: Annotated[
        bool,
        Option(
            "Compute a prompt in chunks over several steps. Without it, a prompt longer than "
            "--max-num-batched-tokens is refused.",
            BATCHING,
            name="chunked_prefill",
        ),
    ] = True
    # Prompts with more tokens are long. Chunks are limited to this size while short prompts
    # arrive. 0: off.
    long_prefill_token_threshold: Annotated[
        int,
        Option(
            "Maximum tokens of one prompt in a step while short prompts arrive, so that they are "
            "not delayed by long ones; 0: no limit. Default: 512, or 0 with --no-chunked-prefill.",
            BATCHING,
            at_least=0,
            default_from=default_threshold,
        ),
    ] = 0
    max_num_partial_prefills: Annotated[  # incomplete prefills after a step
        int | None,
        Option(
            "Maximum number of partially computed prompts; 0: no limit.",
            BATCHING,
            at_least=0,
            default=0,
            kind=int,
            parse=lambda limit: limit or None,
        ),
    ] = None
    max_long_partial_prefills: Annotated[  # long ones among them; short ones overtake
        int | None,
        Option(
            "Maximum number of partially computed prompts longer than "
            "--long-prefill-token-threshold, so that shorter ones overtake them; 0: no limit. "
            "Default: 1 if there is a threshold.",
            BATCHING,
            at_least=0,
            default_from=default_long_prefills,
            kind=int,
            parse=lambda limit: limit or None,
        ),
    ] = None
    # Target duration of steps with decoding requests, which limits their prefill tokens.
    target_step_s: Annotated[
        float | None,
        Option(
            "Target duration of a step while requests decode, in milliseconds: prompts get as "
            "many tokens as fit into it, estimated from earlier steps; 0: no target.",
            BATCHING,
            name="target_step_ms",
            at_least=0,
            default=0.0,
            kind=float,
            parse=lambda step_ms: step_ms / 1e3 if step_ms else None,
        ),
    ] = None
    num_lookahead_tokens: int = 0  # slots beyond the next token, for speculation
    kv_load_failure_policy: Annotated[
        LoadFailurePolicy,
        Option(
            "Action of a decode node when a request's KV does not arrive. recompute: compute the "
            "prompt locally; fail: end the request, and the router retries it on another node.",
            KV_CACHE,
        ),
    ] = LoadFailurePolicy.RECOMPUTE
    # Blocks of each KV group that a grant leaves free for each request that holds blocks.
    remote_headroom_blocks: Annotated[
        int,
        Option(
            "KV blocks that a decode node keeps free for each request that holds blocks, when "
            "it grants blocks to prefill nodes; with 0 it grants more and preempts more often.",
            KV_CACHE,
            at_least=0,
        ),
    ] = 1
    # Limit of the wait for blocks that another request is receiving from the same peer; with 0,
    # they are received twice. Far below the time for which a peer holds blocks without a grant.
    max_prefix_wait_s: float = 5.0
    # Limit of the wait for blocks that an external KV cache loads, or that a peer sends.
    max_load_wait_s: float = 5.0
    # Send each layer of a chunk to the peer when it is computed, instead of whole chunks.
    push_layers: Annotated[
        bool,
        Option(
            "When prefill nodes push KV: after each layer or after each chunk (layer, chunk).",
            KV_CACHE,
            name="push",
            default=LAYER,
            choices=(LAYER, "chunk"),
            parse=lambda unit: unit == LAYER,
        ),
    ] = False
    # Raises InvalidRequest for arguments that no logits processor accepts.
    check_extra_args: Check = reject_extra_args
    collect_events: bool = False  # if set, `take_events` must be called regularly

    def __post_init__(self) -> None:
        check_options(self)
        self._check_sizes()
        self._check_prefill_limits()

    @property
    def num_slots_per_decode(self) -> int:
        """The number of KV slots that a decoding request can write in one step."""
        return 1 + self.num_lookahead_tokens

    def _check_sizes(self) -> None:
        _require("max_model_len", self.max_model_len, self.max_model_len >= 2, "at least 2")
        num_tokens = self.num_lookahead_tokens
        _require("num_lookahead_tokens", num_tokens, num_tokens >= 0, "at least 0")
        # Every running request gets its next token in each step, so all must fit into one step.
        # Draft tokens get the rest.
        budget = self.max_num_batched_tokens
        expected = f"at least max_num_seqs = {self.max_num_seqs}"
        _require("max_num_batched_tokens", budget, budget >= self.max_num_seqs, expected)

    def _check_prefill_limits(self) -> None:
        threshold = self.long_prefill_token_threshold
        if threshold and not self.enable_chunked_prefill:
            raise InvalidConfig("long_prefill_token_threshold needs enable_chunked_prefill")
        for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
            limit = getattr(self, name)
            _require(name, limit, limit is None or limit >= 1, "at least 1, or left out")
        wait_s = self.max_prefix_wait_s
        _require("max_prefix_wait_s", wait_s, wait_s >= 0, "at least 0")
        load_s = self.max_load_wait_s
        _require("max_load_wait_s", load_s, load_s >= 0, "at least 0")
        target_s = self.target_step_s
        _require(
            "target_step_s", target_s, target_s is None or target_s > 0, "above 0, or left out"
        )
        if target_s is not None and not self.enable_chunked_prefill:
            raise InvalidConfig("target_step_s needs enable_chunked_prefill")
        if self.max_long_partial_prefills is not None and not threshold:
            raise InvalidConfig("max_long_partial_prefills needs long_prefill_token_threshold")


def _require(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise InvalidConfig(f"{name} is {value}; it must be {expected}")
