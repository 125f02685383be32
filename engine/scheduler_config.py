"""What the scheduler and the KV cache are told at start. Checked when made, frozen after."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from engine.errors import InvalidConfig
from engine.extra_args import Check, refuse_any
from engine.hashing import PrefixNaming

Choice = TypeVar("Choice", bound=Enum)


class Policy(Enum):
    """Order of the waiting requests, and of those that are preempted last."""

    FCFS = "fcfs"  # arrival
    PRIORITY = "priority"  # priority (lower is earlier), then arrival


class LoadFailurePolicy(Enum):
    """What becomes of a request whose KV did not arrive."""

    RECOMPUTE = "recompute"  # from the start, here
    FAIL = "fail"  # it ends here, and may be served elsewhere


def scheduling_policy_named(name: str) -> Policy:
    """Raises InvalidConfig."""
    return _named(Policy, name, "--scheduling-policy")


def load_failure_policy_named(name: str) -> LoadFailurePolicy:
    """Raises InvalidConfig."""
    return _named(LoadFailurePolicy, name, "--kv-load-failure-policy")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache as numbers."""

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    # Everything that makes the same tokens give other KV: weights, dtype, layout.
    model_salt: str = ""
    hash_seed: int = 0
    # Longer prompts share blocks with prompts of their own length alone: models whose KV
    # depends on how long the prompt is (dynamic rope) need that. None: all share.
    max_shareable_prompt_len: int | None = None
    collect_events: bool = False  # whoever sets it must take them

    def __post_init__(self) -> None:
        _require("num_blocks", self.num_blocks, self.num_blocks >= 1, "at least 1")
        _require("block_size", self.block_size, self.block_size >= 1, "at least 1")

    @property
    def naming(self) -> PrefixNaming:
        return PrefixNaming(
            self.block_size, self.model_salt, self.hash_seed, self.max_shareable_prompt_len
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The names and meanings are those of vLLM V1 where it has them."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_model_len: int = 8192
    vocab_size: int | None = None  # None: token ids are not checked
    eos_token_ids: frozenset[int] = frozenset()
    policy: Policy = Policy.FCFS
    enable_chunked_prefill: bool = True
    # A prompt longer than this is a long one, and no chunk is longer while short prompts come; 0
    # is off.
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None  # prompts that are part done after a step
    # Prompts get as many tokens of a step as let it end in about this time while others decode.
    target_step_s: float | None = None  # None: as many as fit
    max_long_partial_prefills: int | None = None  # long ones among them; short ones overtake
    num_lookahead_tokens: int = 0  # slots beyond the next token, for speculation
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    # Blocks that a grant to a peer must leave free for each request that holds blocks.
    remote_headroom_blocks: int = 1
    # How long a request waits for blocks that another one is receiving from the same peer; 0
    # receives them twice. Far below the time for which a peer holds what is not granted.
    max_prefix_wait_s: float = 5.0
    # Let peers be sent each layer of a chunk as it ends; else all of them when the chunk has.
    push_layers: bool = False
    # Raises InvalidRequest for what no logits processor takes.
    check_extra_args: Check = refuse_any
    collect_events: bool = False  # whoever sets it must take them

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_prefill_limits()

    @property
    def num_slots_per_decode(self) -> int:
        """The KV slots that one decoding request may write in one step."""
        return 1 + self.num_lookahead_tokens

    def _check_sizes(self) -> None:
        _require("max_num_seqs", self.max_num_seqs, self.max_num_seqs >= 1, "at least 1")
        _require("max_model_len", self.max_model_len, self.max_model_len >= 2, "at least 2")
        for name in ("num_lookahead_tokens", "remote_headroom_blocks"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        # Every running request gets its next token in every step, so all must fit in one.
        # Drafted tokens get what is left.
        budget = self.max_num_batched_tokens
        why = f"at least max_num_seqs = {self.max_num_seqs}"
        _require("max_num_batched_tokens", budget, budget >= self.max_num_seqs, why)

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
        target_s = self.target_step_s
        _require(
            "target_step_s", target_s, target_s is None or target_s > 0, "above 0, or left out"
        )
        if target_s is not None and not self.enable_chunked_prefill:
            raise InvalidConfig("target_step_s needs enable_chunked_prefill")
        if self.max_long_partial_prefills is not None and not threshold:
            raise InvalidConfig("max_long_partial_prefills needs long_prefill_token_threshold")


def _named(kind: type[Choice], name: str, option: str) -> Choice:
    known = {one.value: one for one in kind}
    if name not in known:
        raise InvalidConfig(f"{option} {name!r}: choose one of {', '.join(known)}")
    return known[name]


def _require(name: str, value: object, is_good: bool, expected: str) -> None:
    if not is_good:
        raise InvalidConfig(f"{name} is {value}; it must be {expected}")
