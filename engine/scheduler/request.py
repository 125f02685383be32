"""State of one request in the engine: status, tokens and blocks."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from baton.core.foreign_kv import ForeignKv
from baton.core.ids import RequestId
from baton.core.output import RequestStats
from baton.core.request import EngineRequest, TaskOutput
from baton.core.sampling import SamplingParams
from baton.engine.errors import OutOfOrder
from baton.engine.kv_arrival.arrival import Arrival, GivenKv
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.request_media import RequestMedia
from baton.engine.structured_output.grammar import Grammar

# (priority, arrival time, serial number): lower is scheduled earlier. FCFS sets priority to zero.
Rank = tuple[int, float, int]
BY_RANK = attrgetter("rank")  # sort key of requests

NOT_DUE = 0  # steps are numbered from one


class BlockShortage(NamedTuple):
    """State in which there were too few blocks for a waiting request.

    It is not looked up again until blocks are released, requests change their places or its cached
    prefix gets longer. Counters instead of a callback: a release costs nothing here.
    """

    num_releases: int
    num_changes: int
    missing_hash: BlockHash | None  # once it is cached, fewer blocks are needed


class RequestStatus(Enum):
    WAITING_FOR_FSM = "waiting for fsm"  # its grammar is being compiled; holds nothing
    WAITING = "waiting"  # holds nothing
    WAITING_FOR_REMOTE_KVS = "waiting for remote kvs"
    READY = "ready"  # KV landed: holds blocks and waits for a place in the batch
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks: waits in front of requests that never ran
    FINISHED = "finished"


_S = RequestStatus
_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING_FOR_FSM: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING: frozenset({_S.WAITING_FOR_REMOTE_KVS, _S.RUNNING, _S.FINISHED}),
    # Back to WAITING when the KV is lost: the request restarts without a hand-off.
    _S.WAITING_FOR_REMOTE_KVS: frozenset({_S.READY, _S.WAITING, _S.FINISHED}),
    _S.READY: frozenset({_S.RUNNING, _S.PREEMPTED, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """A live request, owned by the scheduler.

    It is scheduled until `kv.num_computed_tokens` has caught up with `num_tokens`.
    """

    submitted: EngineRequest
    rank: Rank
    root_hash: InitVar[BlockHash]
    stop_token_ids: frozenset[int]
    max_num_tokens: int  # the request ends at this length
    adapter_wait_until_s: float | None = None  # then it claims the place that was taken first
    takes_no_prefix: bool = False  # its result needs hidden states of all of its tokens
    # Upper bound of the KV slots it needs: its last token is never an input.
    max_num_slots: int = field(init=False)
    # Copied because every step reads them.
    request_id: RequestId = field(init=False)
    registration: int = field(init=False)
    is_plain: bool = field(init=False)

    status: RequestStatus = field(init=False)
    grammar: Grammar | None = None  # None without one, and while it is being compiled
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    kv: HeldKv = field(init=False)
    arrival: Arrival = field(init=False)
    media: RequestMedia | None = None  # None: its prompt is text alone
    num_prompt_logprobs: int = 0  # already returned
    shortage: BlockShortage | None = None  # found when it was last tried to be started
    lasting_shortage: BlockShortage | None = None  # that no preemption could end
    lasting_unfairness: BlockShortage | None = None  # that preempting over shares could not end
    was_preempted_for_priority: bool = False  # which happens at most once
    is_long: bool = False  # a long prompt whose prefill is not complete
    is_resumed: bool = False  # it has lost its blocks or KV before
    lacks_grant: bool = False  # the decode node that will receive its KV has no blocks for it yet
    due_step: int = NOT_DUE  # the step in which it needs its next block, see RunningBatch

    # Statistics for the last output.
    num_cached_tokens: int = 0
    num_received_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_preemptions: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_state: bytes = b""  # received with the first token, and of use right after it

    @property
    def has_one_new_token(self) -> bool:
        """Return whether it has one token more than when it was last admitted."""
        return self.num_tokens == self.kv.num_context_tokens + 1

    def __post_init__(self, root_hash: BlockHash) -> None:
        submitted, sampling = self.submitted, self.submitted.sampling
        self.max_num_slots = self.max_num_tokens - 1
        self.request_id = submitted.request_id
        self.registration = submitted.registration
        self.is_plain = sampling.logprobs is None and sampling.prompt_logprobs is None
        self.status = _initial_status(sampling)
        self.token_ids = [*submitted.prompt_token_ids, *submitted.prior_output_token_ids]
        self.num_prompt_tokens = len(submitted.prompt_token_ids)
        block_hints = submitted.kv_hints.block_hints(submitted.tenant or submitted.cache_salt)
        self.kv = HeldKv(
            submitted.request_id,
            self.token_ids,
            root_hash,
            block_hints,
            submitted.media,
            submitted.adapter,
        )
        foreign = submitted.foreign_kv
        self.arrival = Arrival(
            self.kv,
            self.rank,
            submitted.receive_from,
            submitted.prefix_source,
            None if foreign is None else _given(foreign, submitted),
        )

    @property
    def is_fetch_of_media(self) -> bool:
        """Return whether it only gets cached blocks with media to this node."""
        return self.media is not None and self.submitted.task.output is TaskOutput.KV

    @property
    def client(self) -> str:
        return self.submitted.client

    @property
    def adapter_id(self) -> str:
        return self.submitted.adapter.id

    @property
    def max_num_hit_tokens(self) -> int:
        """The number of leading tokens that it can take from the prefix cache, if computed here."""
        wants_logprobs = self.submitted.sampling.prompt_logprobs is not None
        if wants_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens:
            return 0  # logprobs exist only for computed tokens
        if self.takes_no_prefix:
            return 0
        # At least one token is computed: the next one is sampled from its logits.
        return self.num_tokens - 1

    @property
    def is_paced(self) -> bool:
        """Return whether its prompt is computed in small chunks, so that decoding is not delayed.

        So is what a decode node computes after it has lost the KV of a hand-off, or its own.
        """
        return self.submitted.is_paced or self.submitted.receive_from is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def served(self) -> RequestStats:
        return RequestStats(
            num_cached_tokens=self.num_cached_tokens,
            num_received_tokens=self.num_received_tokens,
            num_prefilled_tokens=self.num_prefilled_tokens,
            num_preemptions=self.num_preemptions,
            num_proposed_tokens=self.num_proposed_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            loaded_tokens=self.arrival.tokens_by_source(
                min(self.num_cached_tokens, self.num_prompt_tokens)
            ),
        )

    def note_admission(self) -> None:
        """Note the prefix hit of the first run. Later, it could be of its own blocks."""
        if not self.num_preemptions:
            self.num_cached_tokens = self.kv.num_computed_tokens

    def move(self, status: RequestStatus) -> None:
        """Change the status. Raises OutOfOrder for a transition that is not allowed."""
        if status not in _TRANSITIONS[self.status]:
            raise OutOfOrder(f"{self.request_id} cannot go from {self.status} to {status}")
        self.status = status


def _given(kv: ForeignKv, submitted: EngineRequest) -> GivenKv:
    age_s = submitted.age_s + kv.relayed_age_s if kv.age_s is None else kv.age_s
    # A negative age, or NaN, is not trusted.
    return GivenKv(kv, submitted.arrival_s - age_s if age_s >= 0 else -math.inf)


def _initial_status(sampling: SamplingParams) -> RequestStatus:
    has_grammar = sampling.structured_outputs is not None
    return RequestStatus.WAITING_FOR_FSM if has_grammar else RequestStatus.WAITING
