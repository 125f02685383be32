"""A prefill node and a decode node that a test calls directly, without a router.

A test can add a second prefill node.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from google.rpc import status_pb2

from baton.core.ids import NO_ADAPTER, AdapterRef, HandoffId, NodeId, Peer, RequestId
from baton.core.legs import LegKind
from baton.core.output import FinishReason
from baton.core.request import GENERATE, EngineRequest, PrefixSource, ReceiveKv, Task
from baton.core.sampling import SamplingParams
from baton.engine.runner.config import RunnerConfig
from baton.engine.scheduler.config import SchedulerConfig
from baton.engine.spec_decode.config import parse_speculation
from baton.kv_transfer.config import KvWorkerConfig, ReceiverConfig, SenderConfig
from baton.node.adapters.config import AdapterConfig
from baton.node.kv.tiers_config import TiersConfig
from baton.node.options import NodeOptions
from baton.prefill_node.leg import FINISHED_WITH_FIRST_TOKEN
from baton.rpc.adapters import ADAPTER, ORDER, NameOrder
from baton.rpc.channel import open_blocking_channel
from baton.rpc.messages.calls import leg_order, node_request_id
from baton.rpc.messages.conversion import output_from
from baton.rpc.node_info import NodeCard, NodeLoad
from baton.rpc.security.token import AcceptedTokens, authorization
from baton.rpc.status import RemoteError, remote_error_in
from baton.telemetry.options import TelemetryOptions
from baton.v1 import node_pb2, node_pb2_grpc
from tests.support.engine_nodes import EngineNode
from tests.support.nodes import await_load, card_at, is_busy

CALL_S = 60.0  # for a whole call
OPERATOR = "operator"
KINDS = {
    "nixl": {"kv_transport": "nixl"},
    "nixl tcp": {"kv_transport": "nixl", "kv_tls": "tcp", "kv_net_device": "lo"},
    "ucxx": {"kv_transport": "ucxx"},
}


def greedy(max_tokens: int = 8, **settings: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True, **settings}
    )


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Options of a pair that tests vary."""

    model: Path
    kind: str = "nixl"
    chunk_tokens: int = 24  # no multiple of a block
    prefill_bytes: int = 8 << 20
    decode_bytes: int = 8 << 20
    max_num_seqs: int = 16
    # Those of real nodes, since a busy machine may be silent for seconds. Tests of faults differ.
    lease_s: float = 5.0
    silence_s: float = 10.0
    fence_age_s: float | None = None  # None: as long as silence
    has_fence: bool = True
    write_timeout_s: float = 60.0
    block_sizes: tuple[int, int] = (16, 16)  # of P and D
    kv_cache_dtypes: tuple[str, str] = ("auto", "auto")
    kv_staging_bytes: int = 0
    dtype: str = "auto"
    adapters: AdapterConfig = AdapterConfig()
    pooling: str = "auto"
    async_scheduling: bool = False
    tiers: TiersConfig = TiersConfig(host_bytes=0)
    speculative: str = ""
    metrics_port: int | None = None  # of D

    def of(self, role: LegKind) -> NodeOptions:
        is_prefill = role is LegKind.PREFILL
        return NodeOptions(
            runner=RunnerConfig(
                model=str(self.model),
                kv_cache_bytes=self.prefill_bytes if is_prefill else self.decode_bytes,
                max_num_seqs=self.max_num_seqs,
                num_threads=1,
                dtype=self.dtype,
                pooling=self.pooling,
                block_size=self.block_sizes[not is_prefill],
                kv_cache_dtype=self.kv_cache_dtypes[not is_prefill],
                speculation=parse_speculation(self.speculative),
            ),
            scheduling=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.chunk_tokens,
                push_layers=True,
                async_scheduling=self.async_scheduling,
            ),
            adapters=self.adapters,
            tiers=self.tiers,
            operator_tokens=AcceptedTokens((OPERATOR,)),
            telemetry=TelemetryOptions(metrics_port=None if is_prefill else self.metrics_port),
            node_id=role.value,
            kv_staging_bytes=0 if is_prefill else self.kv_staging_bytes,
            kv_worker=self._limits(),
            **KINDS[self.kind],  # type: ignore[arg-type]
        )

    def _limits(self) -> KvWorkerConfig:
        return KvWorkerConfig(
            receiver=ReceiverConfig(
                self.lease_s, self.silence_s, self.fence_age_s or self.silence_s
            ),
            sender=SenderConfig(
                hold_s=60.0, write_timeout_s=self.write_timeout_s, max_write_bytes=4 << 20
            ),
            redial_s=0.2,
        )


@dataclass(slots=True)
class Call:
    """One call to a node, on a stream of its own."""

    responses: Any
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str = ""
    summary: node_pb2.LegSummary = field(default_factory=node_pb2.LegSummary)
    has_ended_well: bool = False
    failure: RemoteError | None = None
    vector: bytes = b""

    @property
    def was_sent(self) -> bool:
        """Return whether a prefill call succeeded, which it does after the last KV write."""
        return self.has_ended_well and self.reason in FINISHED_WITH_FIRST_TOKEN

    def until_tokens(self, count: int) -> Call:
        while len(self.token_ids) < count:
            self._take(next(self.responses))
        return self

    def to_its_end(self) -> Call:
        for response in self.responses:
            self._take(response)
        return self

    def however_it_ends(self) -> Call:
        """Read until the call ends or fails."""
        try:
            return self.to_its_end()
        except grpc.RpcError:
            return self

    def disconnect(self) -> None:
        self.responses.cancel()

    def _take(self, response: Any) -> None:
        for event in response.events:
            self._take_event(event)

    def _take_event(self, event: node_pb2.CallEvent) -> None:
        if event.HasField("end"):
            self.has_ended_well = not event.end.status
            if event.end.status:
                self.failure = remote_error_in(status_pb2.Status.FromString(event.end.status))
            return
        if event.HasField("summary"):
            self.summary = event.summary
        output = event.output
        assert output.first_index == len(self.token_ids)
        self.token_ids += output.token_ids
        self.vector = output.vector or self.vector
        self.reason = output_from(output, RequestId("")).finish_reason or self.reason
        self.error = output.error or self.error


@dataclass(frozen=True, slots=True)
class Answered:
    """Results of both calls of one request."""

    prefill: Call
    decode: Call

    @property
    def token_ids(self) -> list[int]:
        assert self.prefill.token_ids == self.decode.token_ids[:1]
        return self.decode.token_ids

    @property
    def was_handed_over(self) -> bool:
        summary = self.decode.summary
        return self.prefill.was_sent and summary.prompt_tokens_computed == 0


class Pair:
    """Both nodes, running within the `with` block."""

    def __init__(self, options: PairOptions) -> None:
        self._options = options
        self._numbers = itertools.count()
        self._channels: dict[str, grpc.Channel] = {}
        self._calls: list[Call] = []

    def __enter__(self) -> Pair:
        options = self._options
        self.p = EngineNode(LegKind.PREFILL, options.of(LegKind.PREFILL))
        decode = options.of(LegKind.DECODE)
        self.d = EngineNode(LegKind.DECODE, decode, has_fence=options.has_fence)
        try:
            self.p.await_ready()
            self.d.await_ready()
            self.p_card, self.d_card = card_at(self.p.address), card_at(self.d.address)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        codes = self._end()
        if error is None:
            assert codes == [0, 0]

    def _end(self) -> list[int | None]:
        for channel in self._channels.values():
            channel.close()
        return [node.end() for node in (self.d, self.p)]

    # --- Calls of a router ------------------------------------------------------------------

    def new_id(self) -> HandoffId:
        return HandoffId(f"r{next(self._numbers)}", 1)

    def prefill(
        self,
        handoff_id: HandoffId,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        node: EngineNode | None = None,  # None: P
        source: PrefixSource | None = None,
        adapter: AdapterRef = NO_ADAPTER,
        task: Task = GENERATE,
    ) -> Call:
        stub = node_pb2_grpc.LegServiceStub(self._channel(node or self.p))
        request = replace(
            _request(handoff_id, prompt, sampling),
            send_to=handoff_id if task.has_decode_leg else None,
            prefix_source=source,
            adapter=adapter,
            task=task,
        )
        order = leg_order(LegKind.ENCODE if request.task.is_pooling else LegKind.PREFILL, request)
        requests = iter([node_pb2.ServeRequest(call=1, start=order)])
        return self._begun(stub.Serve(requests, timeout=CALL_S, wait_for_ready=True))

    def decode(
        self,
        handoff_id: HandoffId,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        is_local: bool = False,
        node: EngineNode | None = None,  # that sends the KV; None: P
        source: PrefixSource | None = None,
        adapter: AdapterRef = NO_ADAPTER,
    ) -> Call:
        stub = node_pb2_grpc.LegServiceStub(self._channel(self.d))
        request = replace(
            _request(handoff_id, prompt, sampling), prefix_source=source, adapter=adapter
        )
        if not is_local:
            request = replace(request, receive_from=ReceiveKv(handoff_id, _peer(node or self.p)))
        order = leg_order(LegKind.DECODE, request)
        requests = iter([node_pb2.ServeRequest(call=1, start=order)])
        return self._begun(stub.Serve(requests, timeout=CALL_S, wait_for_ready=True))

    def answer_by(
        self,
        node: EngineNode,
        prompt: Sequence[int],
        sampling: SamplingParams,
        source: PrefixSource | None,
        adapter: AdapterRef = NO_ADAPTER,
    ) -> Answered:
        """Let this prefill node compute the prompt, or pull its prefix."""
        handoff_id = self.new_id()
        prefill = self.prefill(
            handoff_id, prompt, sampling, node=node, source=source, adapter=adapter
        )
        decode = self.decode(handoff_id, prompt, sampling, node=node, adapter=adapter)
        return Answered(prefill.to_its_end(), decode.to_its_end())

    def start(
        self, prompt: Sequence[int], sampling: SamplingParams, adapter: AdapterRef = NO_ADAPTER
    ) -> tuple[Call, Call]:
        """Start both calls of a request."""
        handoff_id = self.new_id()
        prefill = self.prefill(handoff_id, prompt, sampling, adapter=adapter)
        return prefill, self.decode(handoff_id, prompt, sampling, adapter=adapter)

    def answer(
        self, prompt: Sequence[int], sampling: SamplingParams, adapter: AdapterRef = NO_ADAPTER
    ) -> Answered:
        prefill, decode = self.start(prompt, sampling, adapter)
        return Answered(prefill.to_its_end(), decode.to_its_end())

    # --- Calls of an operator ---------------------------------------------------------------

    def load_adapter(self, node: EngineNode, name: str, path: str) -> AdapterRef:
        stub = node_pb2_grpc.NodeServiceStub(self._channel(node))
        read = node_pb2.ReadAdapterRequest(name=name, path=path)
        response = stub.ReadAdapter(read, metadata=(authorization(OPERATOR),), timeout=CALL_S)
        adapter = ADAPTER.from_message(response.adapter)
        self._name_adapter(node, NameOrder(name, time.time_ns(), adapter))
        return adapter

    def unload_adapter(self, node: EngineNode, name: str) -> None:
        self._name_adapter(node, NameOrder(name, time.time_ns()))

    def _name_adapter(self, node: EngineNode, order: NameOrder) -> None:
        stub = node_pb2_grpc.NodeServiceStub(self._channel(node))
        request = node_pb2.SetAdapterNamesRequest(names=[ORDER.to_message(order)])
        stub.SetAdapterNames(request, metadata=(authorization(OPERATOR),), timeout=CALL_S)

    def heal(self) -> None:
        """Cancel all calls, and resume or restart both nodes."""
        for call in self._calls:
            call.disconnect()
        self._calls.clear()
        for node in (self.p, self.d):
            if node.is_held:
                node.kill()
            if not node.is_alive:
                node.start()
            node.resume()
            node.await_ready()

    # --- Prefix caches ----------------------------------------------------------------------

    def acquaint_decode(self, prompt: Sequence[int]) -> None:
        """Put the prompt into the prefix cache of the decode node, computed locally."""
        if prompt:
            self.decode(self.new_id(), prompt, greedy(1), is_local=True).to_its_end()

    def acquaint_prefill(self, prompt: Sequence[int]) -> None:
        """Put the prompt into the prefix cache of the prefill node, without a hand-off."""
        if prompt:
            call = self.prefill(self.new_id(), prompt, greedy(1)).until_tokens(1)
            call.disconnect()
            self.await_all_free()

    # --- Events -------------------------------------------------------------------------------

    def await_granted(self) -> None:
        """Wait until the prefill node has received the decode node's grant."""
        await_load(self.d.address, self._has_lent)
        # The link preserves order: later messages arrive after the grant.
        assert self.answer((5, 6, 7), greedy(2)).was_handed_over

    def _has_lent(self, load: NodeLoad) -> bool:
        return is_busy(load) and load.num_free_blocks < self.d_card.num_blocks

    def await_all_free(self, timeout_s: float = 30.0) -> None:
        for node in (self.d, self.p):
            self.await_free_on(node, timeout_s)

    def await_free_on(self, node: EngineNode, timeout_s: float = 30.0) -> None:
        card = self.d_card if node is self.d else self.p_card
        await_load(node.address, all_free(card), timeout_s)

    def _begun(self, responses: Any) -> Call:
        call = Call(responses)
        self._calls.append(call)
        return call

    def _channel(self, node: EngineNode) -> grpc.Channel:
        if node.address not in self._channels:
            self._channels[node.address] = open_blocking_channel(node.address)
        return self._channels[node.address]


def source_of(node: EngineNode, num_tokens: int) -> PrefixSource:
    """Return a node as the source of a prefix of this length."""
    return PrefixSource(_peer(node), num_tokens)


def _peer(node: EngineNode) -> Peer:
    return Peer(NodeId(node.node_id), node.address)


def all_free(card: NodeCard) -> Callable[[NodeLoad], bool]:
    return lambda load: not is_busy(load) and load.num_free_blocks == card.num_blocks


def _request(
    handoff_id: HandoffId, prompt: Sequence[int], sampling: SamplingParams
) -> EngineRequest:
    seed = 0 if sampling.seed is None else sampling.seed
    request_id = node_request_id(handoff_id)
    return EngineRequest(request_id, tuple(prompt), replace(sampling, seed=seed), seed)
