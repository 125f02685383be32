"""Values of a step: plan, results, record; the Protocols of the runner and of observers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from baton.core.ids import NO_PREFIX_KEYS, BlockId, PrefixKeys, RequestId
from baton.core.media import MediaSegment, Picture
from baton.core.output import Failure, TokenLogprobs
from baton.core.request import GENERATE, Task
from baton.core.sampling import SamplingParams
from baton.engine.structured_output.grammar import Grammar
from baton.kv_transfer.records import TransferRecord
from baton.kv_transfer.types import NO_KV_ORDERS, KvOrders, KvReports

Value = TypeVar("Value")
BlockTables = tuple[tuple[BlockId, ...], ...]  # one for each KV group, all of the same length


BlockIds = tuple[BlockId, ...]


class StateBlocks(NamedTuple):
    """Blocks of a request's recurrent state, of all layers that have one.

    A pass reads one side and writes the next one, so that a failed pass can be repeated. With
    drafts, it writes a side for each of its tokens, and continues from that of the last accepted
    one.
    """

    sides: tuple[BlockIds, ...]  # in turn; the first holds the state after `num_computed_tokens`
    snapshot: BlockIds = ()  # if set, the next pass reads it instead of the first side


class StateSnapshot(NamedTuple):
    """Copy of a request's state at the end of a block, taken while a pass computes its tokens."""

    num_tokens: int  # of the request, whose state it is
    block_ids: BlockIds


StateCopies: TypeAlias = Mapping[RequestId, tuple[StateSnapshot, ...]]
NO_STATE_COPIES: StateCopies = {}


class StoredEncoding(NamedTuple):
    """Encoding of a picture in blocks of the KV cache, which its rows fill in order."""

    digest: bytes
    num_rows: int
    block_ids: BlockIds


EncodingSource: TypeAlias = Picture | StoredEncoding


class MediaOrders(NamedTuple):
    """Pictures to encode before a pass, by request, and encodings to forget before that.

    Of a stored encoding, the rows are read instead. A picture can be ordered for several requests,
    and is encoded once.
    """

    freed: tuple[bytes, ...] = ()  # digests
    encoded: Mapping[RequestId, tuple[EncodingSource, ...]] = MappingProxyType({})


NO_MEDIA = MediaOrders()


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Full state of a request that enters the runner's batch, new or resumed.

    The runner keeps the row as long as the request is in its batch.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]  # prompt and output so far
    num_prompt_tokens: int  # the others are output tokens, which matters for penalties
    num_computed_tokens: int  # leading tokens whose KV is in the blocks
    block_tables: BlockTables
    sampling: SamplingParams
    seed: int
    grammar: Grammar | None = None  # restricts the tokens that can be sampled
    state: StateBlocks | None = None  # of a model with recurrent layers
    task: Task = GENERATE
    adapter: str = ""  # id of the adapter that computes it; empty: none
    media: tuple[MediaSegment, ...] = ()  # in the prompt
    prefix_keys: PrefixKeys = NO_PREFIX_KEYS  # only where they are equal, drafts are shared
    predicted_token_ids: tuple[int, ...] = ()  # that the output is likely to repeat
    draft_state: bytes = b""  # of a draft head, after `token_ids`

    @property
    def wants_prompt_logprobs(self) -> bool:
        """False for a resumed request: it returned its prompt logprobs before it was preempted."""
        has_outputs = len(self.token_ids) > self.num_prompt_tokens
        return self.sampling.prompt_logprobs is not None and not has_outputs


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of the batch, as changes relative to the previous step.

    The runner keeps the tokens, blocks and `num_computed_tokens` of each row. It advances the
    count by `num_scheduled_tokens` and appends sampled tokens to the row. It samples a row whose
    scheduled tokens reach the last known token, but not one in the middle of a chunked prefill.
    """

    dropped: tuple[RequestId, ...] = ()  # rows to remove: finished, aborted or preempted
    started: tuple[PlanRow, ...] = ()
    new_block_ids: dict[RequestId, BlockTables] = field(default_factory=dict)
    num_scheduled_tokens: dict[RequestId, int] = field(default_factory=dict)
    num_prompt_tokens: int = 0  # prompt tokens among them; zero if `is_retry`
    # With speculation: the part of the token budget left for draft tokens of all rows.
    max_draft_tokens: int = 0
    kv_orders: KvOrders = NO_KV_ORDERS
    state_copies: StateCopies = field(default_factory=dict)
    media: MediaOrders = NO_MEDIA
    # Repeats a part of a failed pass. The runner first removes all rows that the plan names,
    # known or not. No layer of KV is sent to a peer before the pass has ended.
    is_retry: bool = False

    def retry(self, rows: Collection[PlanRow]) -> Plan:
        """Return the part of this plan that concerns these rows, as a pass of its own."""
        request_ids = {row.request_id for row in rows}
        return Plan(
            started=tuple(rows),
            num_scheduled_tokens=_part(self.num_scheduled_tokens, request_ids),
            state_copies=_part(self.state_copies, request_ids),
            media=self.media._replace(encoded=_part(self.media.encoded, request_ids)),
            is_retry=True,
        )

    @property
    def concerns_runner(self) -> bool:
        has_rows = self.num_scheduled_tokens or self.started or self.dropped
        return bool(has_rows or self.media is not NO_MEDIA)

    @property
    def is_empty(self) -> bool:
        """True if nothing can be done now, nor in the next step unless new input arrives."""
        return not self.concerns_runner and self.kv_orders == NO_KV_ORDERS


def _part(
    by_request: Mapping[RequestId, Value], keys: Collection[RequestId]
) -> dict[RequestId, Value]:
    return {request_id: by_request[request_id] for request_id in by_request if request_id in keys}


@dataclass(frozen=True, slots=True)
class RunResult:
    """Results of a forward pass, by request."""

    token_ids: dict[RequestId, list[int]] = field(default_factory=dict)
    logprobs: dict[RequestId, list[TokenLogprobs]] = field(default_factory=dict)
    # Logprobs of the prompt tokens scheduled in this step; None for the first of a prompt.
    prompt_logprobs: dict[RequestId, list[TokenLogprobs | None]] = field(default_factory=dict)
    failures: dict[RequestId, Failure] = field(default_factory=dict)  # instead of a token
    vectors: dict[RequestId, bytes] = field(default_factory=dict)  # of pooled requests, see Output
    # With speculation: number of proposed tokens. The accepted ones are in `token_ids`.
    num_proposed: dict[RequestId, int] = field(default_factory=dict)
    encode_s: dict[RequestId, float] = field(default_factory=dict)  # for pictures, before the pass
    # With a draft head: the states after the first tokens that rows sample here.
    draft_states: dict[RequestId, bytes] = field(default_factory=dict)

    def without(self, request_ids: Collection[RequestId]) -> RunResult:
        """Return the results of all other requests."""
        parts = (getattr(self, part.name) for part in fields(self))
        return RunResult(
            *({key: part[key] for key in part if key not in request_ids} for part in parts)
        )


class Pending(Protocol):
    """A launched pass."""

    def allows(self, plan: Plan) -> bool:
        """Return whether the pass of the next plan can be launched before this one is collected."""
        ...

    def collect(self) -> RunResult:
        """Wait for the pass, and return its results. Call it once.

        On return the device has finished this pass and all earlier ones: the transport can read
        their blocks, and the KV worker can grant them to a peer.
        """
        ...


@dataclass(frozen=True, slots=True)
class FinishedPass:
    """Pass that has ended with its launch. Implements `Pending`."""

    result: RunResult

    def allows(self, plan: Plan) -> bool:
        return False

    def collect(self) -> RunResult:
        return self.result


class Runner(Protocol):
    """Runs the model over plans. All code that depends on torch is behind this protocol."""

    def launch(self, plan: Plan) -> Pending:
        """Start the pass of a plan. Passes are collected in the order of their launch.

        The next plan needs the tokens of this one. So a pass is collected before the next one is
        launched, unless it `allows` that: the device then passes the tokens on. If it fails after
        that, the next plan is a retry, and the pass launched behind it is never collected.
        """
        ...


class StepRecord(NamedTuple):
    """One complete step."""

    plan: Plan
    # Begin of the step, and the ends of its parts: schedule, start orders, run, poll, update.
    times_s: tuple[float, ...]
    reports: KvReports
    transfers: tuple[TransferRecord, ...]  # ended since the last step


class StepObserver:
    """Base class of observers, whose methods do nothing.

    The engine thread calls them, in the order in which they are defined. They must not block. If
    a step ends the engine, the remaining calls are omitted.
    """

    def note_plan(self, plan: Plan, now_s: float) -> None:
        """Note a plan whose KV orders have started. Its pass follows."""

    def note_encoded(self, plan: Plan, encode_s: Mapping[RequestId, float], began_s: float) -> None:
        """Note how long the encoding of the plan's pictures took, before its pass."""

    def note_pass(self, plan: Plan, began_s: float, ended_s: float) -> None:
        """Note a pass that succeeded: of the step's plan, or of a part that is run again."""

    def note_end(self, step: StepRecord) -> None:
        """Note the end of a step, before its outputs are delivered."""
