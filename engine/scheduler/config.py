"""Settings of the scheduler and the KV cache. Validated on construction, immutable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from baton.core.errors import InvalidConfig
from baton.core.extra_args import Check, reject_extra_args
from baton.engine.kv_cache.block_hashes import PrefixNaming
from baton.engine.kv_cache.groups import ONE_GROUP, KvGroup

Choice = TypeVar("Choice", bound=Enum)


class SchedulingPolicy(Enum):
    """Scheduling order of waiting requests, and reverse order of preemption."""

    FCFS = "fcfs"  # arrival
    PRIORITY = "priority"  # priority (lower is earlier), then arrival


class LoadFailurePolicy(Enum):
    """Handling of requests whose KV did not arrive."""

    RECOMPUTE = "recompute"  # from the start, on this node
    FAIL = "fail"  # end the request here; the router can retry it on another node


def parse_scheduling_policy(name: str) -> SchedulingPolicy:
    """Parse a value of --scheduling-policy. Raises InvalidConfig."""
    return _parse_choice(SchedulingPolicy, name, "--scheduling-policy")


def parse_load_failure_policy(name: str) -> LoadFailurePolicy:
    """Parse a value of --kv-load-failure-policy. Raises InvalidConfig."""
    return _parse_choice(LoadFailurePolicy, name, "--kv-load-failure-policy")


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
class PullConfig:
    """Settings of pulls of cached prefixes from other nodes."""

    name: str  # of their hand-offs, unique among all processes of all nodes
    block_bytes: int
    # A run is given or fails as a whole.
    max_run_blocks: int = 64
    max_run_bytes: int = 16 << 20

    @property
    def blocks_per_run(self) -> int:
        return max(1, min(self.max_run_blocks, self.max_run_bytes // self.block_bytes))


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler. Names and meanings follow vLLM V1 where it has them."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    vocab_size: int | None = None  # None: token ids are not checked
    eos_token_ids: frozenset[int] = frozenset()
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_chunked_prefill: bool = True
    # Prompts with more tokens are long. Chunks are limited to this size while short prompts
    # arrive. 0: off.
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None  # incomplete prefills after a step
    # Target duration of steps with decoding requests, which limits their prefill tokens.
    target_step_s: float | None = None  # None: no target
    max_long_partial_prefills: int | None = None  # long ones among them; short ones overtake
    num_lookahead_tokens: int = 0  # slots beyond the next token, for speculation
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    # Blocks of each KV group that a grant leaves free for each request that holds blocks.
    remote_headroom_blocks: int = 1
    # Limit of the wait for blocks that another request is receiving from the same peer; with 0,
    # they are received twice. Far below the time for which a peer holds blocks without a grant.
    max_prefix_wait_s: float = 5.0
    # Limit of the wait for blocks that an external KV cache loads, or that a peer sends.
    max_load_wait_s: float = 5.0
    # Send each layer of a chunk to the peer when it is computed, instead of whole chunks.
    push_layers: bool = False
    # Raises InvalidRequest for arguments that no logits processor accepts.
    check_extra_args: Check = reject_extra_args
    collect_events: bool = False  # if set, `take_events` must be called regularly

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_prefill_limits()

    @property
    def num_slots_per_decode(self) -> int:
        """The number of KV slots that a decoding request can write in one step."""
        return 1 + self.num_lookahead_tokens

    def _check_sizes(self) -> None:
        _require("max_num_seqs", self.max_num_seqs, self.max_num_seqs >= 1, "at least 1")
        _require("max_model_len", self.max_model_len, self.max_model_len >= 2, "at least 2")
        for name in ("num_lookahead_tokens", "remote_headroom_blocks"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        # Every running request gets its next token in each step, so all must fit into one step.
        # Draft tokens get the rest.
        budget = self.max_num_batched_tokens
        expected = f"at least max_num_seqs = {self.max_num_seqs}"
        _require("max_num_batched_tokens", budget, budget >= self.max_num_seqs, expected)

    def _check_prefill_limits(self) -> None:
        threshold = self.long_prefill_token_threshold
        _require("long_prefill_token_threshold", threshold, threshold >= 0, "at least 0")
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


def _parse_choice(kind: type[Choice], name: str, option: str) -> Choice:
    known = {choice.value: choice for choice in kind}
    if name not in known:
        raise InvalidConfig(f"{option} {name!r}: choose one of {', '.join(known)}")
    return known[name]


def _require(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise InvalidConfig(f"{name} is {value}; it must be {expected}")
