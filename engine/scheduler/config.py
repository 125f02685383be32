"""Settings of the scheduler and the KV cache. Validated on construction, immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

from baton.core.errors import InvalidConfig, require_setting
from baton.core.extra_args import Check, reject_extra_args
from baton.core.media import PictureRows, StoredRows
from baton.core.options import BATCHING, KV_CACHE, Option, check_options
from baton.core.pooling import Pooling
from baton.core.request import Task, TaskOutput
from baton.engine.runner.config import MaxNumBatchedTokens, MaxNumSeqs

DEFAULT_LONG_PREFILL_THRESHOLD = 512
LAYER = "layer"
NEEDED = (  # a setting, and the one that it needs
    ("long_prefill_token_threshold", "enable_chunked_prefill"),
    ("target_step_s", "enable_chunked_prefill"),
    ("max_long_partial_prefills", "long_prefill_token_threshold"),
)


class SchedulingPolicy(Enum):
    """Scheduling order of waiting requests, and reverse order of preemption."""

    FCFS = "fcfs"  # arrival
    PRIORITY = "priority"  # priority (lower is earlier), then arrival


class LoadFailurePolicy(Enum):
    """Handling of requests whose KV did not arrive."""

    RECOMPUTE = "recompute"  # from the start, on this node
    FAIL = "fail"  # end the request here; the router can retry it on another node


def default_threshold(given: Mapping[str, Any]) -> int:
    """Return the default of long-prefill-token-threshold for these options."""
    return DEFAULT_LONG_PREFILL_THRESHOLD if given.get("chunked_prefill", True) else 0


def default_long_prefills(given: Mapping[str, Any]) -> int | None:
    """Return the default of max-long-partial-prefills for these options."""
    threshold = given.get("long_prefill_token_threshold")
    return 1 if (default_threshold(given) if threshold is None else threshold) else None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler. Names and meanings follow vLLM V1 where it has them."""

    max_num_batched_tokens: MaxNumBatchedTokens = 2048
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
            is_setting=True,
        ),
    ] = SchedulingPolicy.FCFS
    enable_chunked_prefill: Annotated[
        bool,
        Option(
            "Compute a prompt in chunks over several steps. Without it, a prompt longer than "
            "--max-num-batched-tokens is refused.",
            BATCHING,
            name="chunked_prefill",
            is_setting=True,
        ),
    ] = True
    # Prompts with more tokens are long.
    long_prefill_token_threshold: Annotated[
        int,
        Option(
            "Maximum tokens of one prompt in a step while short prompts arrive, so that they are "
            "not delayed by long ones; 0: no limit. Default: 512, or 0 without chunked-prefill.",
            BATCHING,
            at_least=0,
            default_from=default_threshold,
            is_setting=True,
        ),
    ] = 0
    max_num_partial_prefills: Annotated[  # incomplete prefills after a step
        int | None,
        Option(
            "Maximum number of partially computed prompts, counted apart for those longer than "
            "long-prefill-token-threshold; more urgent ones start all the same; 0: no limit.",
            BATCHING,
            at_least=0,
            default=0,
            kind=int,
            parse=lambda limit: limit or None,
            is_setting=True,
        ),
    ] = None
    max_long_partial_prefills: Annotated[  # long ones among them; short ones overtake
        int | None,
        Option(
            "Maximum number of partially computed prompts longer than "
            "long-prefill-token-threshold, so that shorter ones overtake them; 0: no limit. "
            "Default: 1 if there is a threshold.",
            BATCHING,
            at_least=0,
            default_from=default_long_prefills,
            kind=int,
            parse=lambda limit: limit or None,
            is_setting=True,
        ),
    ] = None
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
            is_setting=True,
        ),
    ] = None
    async_scheduling: Annotated[
        bool,
        Option(
            "Plan the next step while the model computes the one before it, on another thread. "
            "Saves time between passes on GPUs.",
            BATCHING,
        ),
    ] = False
    num_lookahead_tokens: int = 0  # slots beyond the next token, for speculation
    kv_load_failure_policy: Annotated[
        LoadFailurePolicy,
        Option(
            "Action of a decode node when a request's KV does not arrive. recompute: compute the "
            "prompt locally; fail: end the request, and the router retries it on another node.",
            KV_CACHE,
            is_setting=True,
        ),
    ] = LoadFailurePolicy.RECOMPUTE
    # Of each KV group.
    remote_headroom_blocks: Annotated[
        int,
        Option(
            "KV blocks that a decode node keeps free for each request that holds blocks, when "
            "it grants blocks to prefill nodes; with 0 it grants more and preempts more often.",
            KV_CACHE,
            at_least=0,
            is_setting=True,
        ),
    ] = 1
    # Limit of a request's wait for loads, pulls and hand-offs of other requests, in sum; with 0, it
    # waits for none. Far below the time for which a peer holds blocks without a grant.
    max_fill_wait_s: float = 5.0
    push_layers: Annotated[
        bool,
        Option(
            "When prefill nodes push KV: after each layer or after each chunk (layer, chunk).",
            KV_CACHE,
            name="push",
            default=LAYER,
            choices=(LAYER, "chunk"),
            parse=lambda unit: unit == LAYER,
            is_setting=True,
        ),
    ] = False
    max_loras: int = 0  # different adapters in a batch
    # A request whose adapter gets no place claims the one that was taken first after this time.
    max_adapter_wait_s: float = 5.0
    encoder_cache_tokens: Annotated[
        int,
        Option(
            "Tokens of pictures whose encodings a node keeps in memory, so that a picture which "
            "it has seen is not encoded again. The largest picture must fit.",
            BATCHING,
            at_least=1,
            is_setting=True,
        ),
    ] = 16_384
    picture_rows: PictureRows | None = None  # of its encodings; None: no vision tower is loaded
    stored_rows: StoredRows | None = None  # encodings in its KV cache; None: it takes no pictures
    takes_prompt_embeds: bool = False  # instead of pictures
    whole_pictures: bool = False  # all tokens of a picture are computed in one step
    pooling: Pooling | None = None  # of the model; None: it embeds nothing
    can_generate: bool = True
    # Raises InvalidRequest for arguments that no logits processor accepts.
    check_extra_args: Check = reject_extra_args

    def __post_init__(self) -> None:
        check_options(self)
        self._check_sizes()
        self._check_prefill_limits()

    @property
    def num_slots_per_decode(self) -> int:
        """The number of KV slots that a decoding request can write in one step."""
        return 1 + self.num_lookahead_tokens

    @property
    def num_encoder_rows(self) -> int:
        """The size of the cache of encodings in rows; 0: the model takes no pictures."""
        takes_pictures = self.picture_rows is not None or self.stored_rows is not None
        return self.encoder_cache_tokens if takes_pictures else 0

    @property
    def max_whole_picture(self) -> int:
        """Tokens of a picture that fit into a step while all other requests decode."""
        return self.max_num_batched_tokens - self.max_num_seqs + 1

    def needs_all_tokens(self, task: Task) -> bool:
        """Return whether a vector needs hidden states of more than the last token."""
        pools_all = self.pooling is not None and self.pooling.needs_all_tokens
        return pools_all or task.output is TaskOutput.VECTORS

    def without_chunks(self) -> SchedulerConfig:
        """Return these settings for a model that computes each prompt in one step."""
        return replace(
            self,
            enable_chunked_prefill=False,
            long_prefill_token_threshold=0,
            max_long_partial_prefills=None,
            target_step_s=None,
        )

    def _check_sizes(self) -> None:
        require_setting("max_model_len", self.max_model_len, self.max_model_len >= 2, "at least 2")
        num_tokens = self.num_lookahead_tokens
        require_setting("num_lookahead_tokens", num_tokens, num_tokens >= 0, "at least 0")
        # Every running request gets its next token in each step, so all must fit into one step.
        # Draft tokens get the rest.
        budget = self.max_num_batched_tokens
        expected = f"at least max_num_seqs = {self.max_num_seqs}"
        require_setting("max_num_batched_tokens", budget, budget >= self.max_num_seqs, expected)

    def _check_prefill_limits(self) -> None:
        for name in ("max_num_partial_prefills", "max_long_partial_prefills"):
            limit = getattr(self, name)
            require_setting(name, limit, limit is None or limit >= 1, "at least 1, or left out")
        wait_s = self.max_fill_wait_s
        require_setting("max_fill_wait_s", wait_s, wait_s >= 0, "at least 0")
        target_s = self.target_step_s
        require_setting(
            "target_step_s", target_s, target_s is None or target_s > 0, "above 0, or left out"
        )
        for name, other in NEEDED:
            if getattr(self, name) and not getattr(self, other):
                raise InvalidConfig(f"{name} needs {other}")
