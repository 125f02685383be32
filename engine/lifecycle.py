"""One request while it lives in the engine: its status, its tokens and its blocks."""

from __future__ import annotations

from enum import Enum

from engine.errors import OutOfTurn
from engine.grammar import Grammar
from engine.hashing import BlockHash
from engine.request import ClientId, ReceiveKv, RequestId, RequestSpec, Served
from engine.sampling import SamplingParams
from kv_transfer.types import BlockId

# (priority, arrival time, serial): lower goes earlier. FCFS leaves the first at zero.
Rank = tuple[int, float, int]

NOT_DUE = 0  # steps are counted from one


class RequestStatus(Enum):
    WAITING_FOR_FSM = "waiting for fsm"  # its grammar is being compiled; holds nothing
    WAITING = "waiting"  # holds nothing
    WAITING_FOR_REMOTE_KVS = "waiting for remote kvs"
    READY = "ready"  # KV landed; holds blocks, waits for a place in the batch
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks; waits in front of those that never ran
    FINISHED = "finished"


_S = RequestStatus
_MOVES: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING_FOR_FSM: frozenset({_S.WAITING, _S.FINISHED}),
    _S.WAITING: frozenset({_S.WAITING_FOR_REMOTE_KVS, _S.RUNNING, _S.FINISHED}),
    # Back to WAITING when the KV is lost: the request starts anew, without a hand-off.
    _S.WAITING_FOR_REMOTE_KVS: frozenset({_S.READY, _S.WAITING, _S.FINISHED}),
    _S.READY: frozenset({_S.RUNNING, _S.PREEMPTED, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class Request:
    """Owned by the scheduler. `num_computed_tokens` wants to catch up with `num_tokens`."""

    __slots__ = (
        "block_hashes",
        "block_ids",
        "client_id",
        "due_step",
        "follows_until_s",
        "gave_way",
        "grammar",
        "is_long",
        "is_plain",
        "is_registering",
        "max_num_slots",
        "max_num_tokens",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_context_tokens",
        "num_preemptions",
        "num_prefilled_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_proposed_tokens",
        "num_received_tokens",
        "num_registered_blocks",
        "rank",
        "receive",
        "request_id",
        "root_hash",
        "spec",
        "status",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        spec: RequestSpec,
        rank: Rank,
        root_hash: BlockHash,
        stop_token_ids: frozenset[int],
        max_num_tokens: int,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.root_hash = root_hash
        self.stop_token_ids = stop_token_ids
        self.max_num_tokens = max_num_tokens  # it ends when it has so many
        # The most KV slots it can ever need: its last token is never an input.
        self.max_num_slots = max_num_tokens - 1
        # Kept beside the spec because every step reads them.
        self.request_id: RequestId = spec.request_id
        self.client_id: ClientId = spec.client_id
        sampling = spec.sampling
        self.is_plain = sampling.logprobs is None and sampling.prompt_logprobs is None

        self.status = _first_status(sampling)
        self.grammar: Grammar | None = None  # what it may write; None while it is compiled, too
        self.receive: ReceiveKv | None = spec.receive_from  # None once it landed or was lost
        # When it stops waiting for others' hand-offs; None: it has not waited yet.
        self.follows_until_s: float | None = None
        self.token_ids: list[int] = [*spec.prompt_token_ids, *spec.prior_output_token_ids]
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.num_context_tokens = len(self.token_ids)  # what it came with
        self.num_computed_tokens = 0
        self.num_prompt_logprobs = 0  # handed out already
        self.block_ids: list[BlockId] = []
        self.block_hashes: list[BlockHash] = []  # of its first full blocks
        self.num_registered_blocks = 0  # its first so many can be hit by others
        self.is_registering = True  # False: its KV is older than a reset of the cache
        self.gave_way = False  # preempted for one of higher priority; once is enough
        self.is_long = False  # a long prompt, not yet computed to its end
        self.due_step = NOT_DUE  # when it needs its next block, see calendar

        # For the account that goes out with the last output.
        self.num_cached_tokens = 0
        self.num_received_tokens = 0
        self.num_prefilled_tokens = 0
        self.num_preemptions = self.num_proposed_tokens = self.num_accepted_tokens = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def served(self) -> Served:
        return Served(
            num_cached_tokens=self.num_cached_tokens,
            num_received_tokens=self.num_received_tokens,
            num_prefilled_tokens=self.num_prefilled_tokens,
            num_preemptions=self.num_preemptions,
            num_proposed_tokens=self.num_proposed_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )

    def move(self, status: RequestStatus) -> None:
        """The only way to a new status."""
        if status not in _MOVES[self.status]:
            raise OutOfTurn(f"{self.request_id} cannot go from {self.status} to {status}")
        self.status = status


def _first_status(sampling: SamplingParams) -> RequestStatus:
    is_ruled = sampling.structured_outputs is not None
    return RequestStatus.WAITING_FOR_FSM if is_ruled else RequestStatus.WAITING
