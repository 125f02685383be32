"""Simulated KV peers that are late, silent or gone and write garbage where they may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.ids import BlockId, HandoffId, RequestId
from baton.core.output import FirstToken
from baton.core.request import EngineRequest
from baton.kv_transfer.types import (
    Complete,
    KvOrders,
    KvReports,
    Landed,
    Lost,
    Proved,
    Receive,
    Requested,
    Withdraw,
)
from tests.support.fake_runner import (
    ONE_FULL,
    Content,
    KvTensor,
    Slot,
    Specs,
    content_of,
    next_token,
    seen_tokens,
)


@dataclass(slots=True)
class Incoming:
    order: Receive
    is_over: bool = False  # lost or revoked, but not released yet
    num_proved: int = 0  # leading blocks that have landed as a whole


@dataclass(slots=True)
class Outgoing:
    request_id: RequestId  # unused for a pull
    block_ids: list[BlockId] = field(default_factory=list)
    coming: tuple[BlockId, ...] = ()  # those that the pass in progress completes
    is_ended: bool = False
    is_withdrawn: bool = False
    num_tokens: int | None = None  # from Complete
    first_token: FirstToken | None = None
    names: tuple[bytes, ...] = ()  # of a pull


class FakeWire:
    """KV worker whose peers compute correct KV. A test drives the transfers.

    A peer has every block passed to `know`, and pulls such blocks.
    """

    def __init__(
        self,
        kv: KvTensor,
        vocab_size: int,
        specs: Specs = ONE_FULL,
        num_state_blocks: int = 0,
    ) -> None:
        self._kv = kv
        self._vocab_size = vocab_size
        self._specs = specs
        self._num_state_blocks = num_state_blocks
        self._spec_by_id: dict[RequestId, EngineRequest] = {}
        self.incoming: dict[HandoffId, Incoming] = {}
        self.outgoing: dict[HandoffId, Outgoing] = {}
        self._landed: list[Landed] = []
        self._lost: list[Lost] = []
        self._proved: list[Proved] = []
        self.num_proved_if_revoked = 0  # leading blocks of a receive that have landed by then
        self._released: list[HandoffId] = []
        self._sent: list[HandoffId] = []
        self._requested: list[Requested] = []
        self._granted: list[HandoffId] = []
        self._slots_by_name: dict[bytes, list[Slot]] = {}
        self.num_pulled = self.num_given = 0  # blocks that landed, and those that peers pulled

    def know(self, slots_by_name: Mapping[bytes, list[Slot]]) -> None:
        """Learn what cached blocks of these names hold."""
        self._slots_by_name.update(slots_by_name)

    @property
    def known_names(self) -> Sequence[bytes]:
        return tuple(self._slots_by_name)

    def expect(self, engine_request: EngineRequest) -> None:
        """Register a request with the peer."""
        self._spec_by_id[engine_request.request_id] = engine_request
        if engine_request.send_to is not None:
            self.outgoing[engine_request.send_to] = Outgoing(engine_request.request_id)

    def wanted(self) -> list[HandoffId]:
        """Return the receives that are waited for."""
        return [h for h, incoming in self.incoming.items() if not incoming.is_over]

    def unwanted(self) -> list[HandoffId]:
        """Return the lost or revoked receives that are not released yet."""
        return [h for h, incoming in self.incoming.items() if incoming.is_over]

    def endable(self) -> list[HandoffId]:
        """Return the sends that can end now. A pull ends after its orders."""
        return [
            h for h, outgoing in self.outgoing.items() if outgoing.is_ended or not outgoing.names
        ]

    # --- transfers ----------------------------------------------------------------

    def land(self, handoff_id: HandoffId) -> None:
        """Land a receive. No write follows."""
        order = self.incoming.pop(handoff_id).order
        if order.names:
            self._land_pull(order)
            return
        request = self._spec_by_id[RequestId(handoff_id.request_id)]
        content = self._write(order, len(order.block_ids))
        token = FirstToken(next_token(content, request.seed, self._vocab_size, self._specs))
        self._landed.append(Landed(handoff_id, order.num_tokens, token))

    def _write(self, order: Receive, num_blocks: int) -> Content:
        """Write the first blocks of a receive. Returns the content of all of its tokens."""
        request = self._spec_by_id[RequestId(order.handoff_id.request_id)]
        context, content = context_of(request), self._content_of(request)
        assert order.num_tokens == len(context)
        blocks = self._blocks(content, len(context))[order.first_block :]
        assert len(blocks) == len(order.block_ids)
        for slots, block_id in zip(blocks[:num_blocks], order.block_ids, strict=False):
            for place, slot in enumerate(slots):
                self._kv.write([block_id], place, slot)
        return content

    def _land_pull(self, order: Receive) -> None:
        for name, block_id in zip(order.names, order.block_ids, strict=True):
            self._kv.blocks[block_id] = list(self._slots_by_name[name])
        self.num_pulled += len(order.names)
        self._landed.append(Landed(order.handoff_id, order.num_tokens, None))

    def request(self, handoff_id: HandoffId, names: Sequence[bytes]) -> None:
        """Pull blocks, as a peer."""
        self.outgoing[handoff_id] = Outgoing(RequestId(""), names=tuple(names))
        self._requested.append(Requested(handoff_id, tuple(names)))

    def grant(self, handoff_id: HandoffId) -> None:
        """Grant blocks for a hand-off, as a peer. Its request may not have come yet."""
        self._granted.append(handoff_id)

    def open_requests(self) -> list[HandoffId]:
        """Return the pulls of peers that have not ended."""
        return [handoff_id for handoff_id, outgoing in self.outgoing.items() if outgoing.names]

    def lose(self, handoff_id: HandoffId, num_proved: int = 0) -> None:
        """Lose a receive. The first blocks have landed, and nothing is written to them any more."""
        self._give_up(self.incoming[handoff_id], num_proved)
        self._lost.append(Lost(handoff_id, "the peer is gone"))

    def _give_up(self, incoming: Incoming, num_proved: int) -> None:
        order, incoming.is_over = incoming.order, True
        incoming.num_proved = 0 if order.names else min(num_proved, len(order.block_ids))
        if incoming.num_proved:
            self._write(order, incoming.num_proved)
            self._proved.append(Proved(order.handoff_id, incoming.num_proved))

    def release(self, handoff_id: HandoffId) -> None:
        """Release a lost or revoked receive after its last write."""
        incoming = self.incoming.pop(handoff_id)
        assert incoming.is_over
        self._kv.spoil(incoming.order.block_ids[incoming.num_proved :])
        self._released.append(handoff_id)

    def report_again_released(self, handoff_id: HandoffId) -> None:
        """Report an event a second time, against the protocol."""
        self._released.append(handoff_id)

    def end_sending(self, handoff_id: HandoffId) -> None:
        """End a send. Orders that are issued before the report arrives have no effect."""
        self._check_sent(handoff_id)
        del self.outgoing[handoff_id]
        self._sent.append(handoff_id)

    def settle(self) -> None:
        """Complete everything that is outstanding."""
        for handoff_id, incoming in list(self.incoming.items()):
            self.release(handoff_id) if incoming.is_over else self.land(handoff_id)
        for handoff_id, outgoing in list(self.outgoing.items()):
            if outgoing.is_ended:
                self.end_sending(handoff_id)

    # --- KV worker interface ------------------------------------------------------

    def start(self, orders: KvOrders) -> None:
        for receive in orders.receives:
            assert receive.handoff_id not in self.incoming
            self.incoming[receive.handoff_id] = Incoming(receive)
        for handoff_id in orders.revokes:
            # It may have landed, or been lost, before the order came.
            incoming = self.incoming.get(handoff_id)
            if incoming is not None and not incoming.is_over:
                self._give_up(incoming, self.num_proved_if_revoked)
        # Completed hand-offs are removed: see end_sending.
        for send in orders.sends:
            if send.handoff_id in self._sent:
                continue
            outgoing = self.outgoing[send.handoff_id]
            assert send.first_block == len(outgoing.block_ids), "a gap or a repeat"
            assert not outgoing.is_ended
            assert send.block_ids[: len(outgoing.coming)] == outgoing.coming
            outgoing.block_ids += send.block_ids
            outgoing.coming = ()
        for send in orders.layer_sends:
            if send.handoff_id not in self._sent:
                outgoing = self.outgoing[send.handoff_id]
                assert send.first_block == len(outgoing.block_ids), "a gap or a repeat"
                assert not outgoing.coming, "the pass before it has not ended"
                outgoing.coming = send.block_ids
        ends: tuple[Complete | Withdraw, ...] = (*orders.completes, *orders.withdraws)
        for end in ends:
            if end.handoff_id not in self._sent:
                self._end(self.outgoing[end.handoff_id], end)

    def misbehave(self) -> None:
        """Write garbage to all writable blocks, and read all readable ones."""
        for incoming in self.incoming.values():
            self._kv.spoil(incoming.order.block_ids[incoming.num_proved :])
        for handoff_id in self.outgoing:
            self._check_sent(handoff_id)

    def poll(self) -> KvReports:
        reports = KvReports(
            finished_recving=tuple(self._landed),
            failed_recving=tuple(self._lost),
            proved=tuple(self._proved),
            released=tuple(self._released),
            finished_sending=tuple(self._sent),
            requested=tuple(self._requested),
            granted=tuple(self._granted),
        )
        self._landed, self._lost, self._released, self._sent = [], [], [], []
        self._requested, self._proved, self._granted = [], [], []
        return reports

    def _end(self, outgoing: Outgoing, end: Complete | Withdraw) -> None:
        # A hand-off that was completed may be given up while the wire is still busy with it.
        assert not outgoing.is_withdrawn
        assert not (outgoing.is_ended and isinstance(end, Complete))
        outgoing.is_ended = True
        outgoing.is_withdrawn = isinstance(end, Withdraw)
        if isinstance(end, Complete):
            outgoing.num_tokens = end.num_tokens
            outgoing.first_token = end.first_token

    def _check_sent(self, handoff_id: HandoffId) -> None:
        """Check that a block that is read holds the correct KV."""
        outgoing = self.outgoing[handoff_id]
        if outgoing.names:
            self._check_given(outgoing)
            return
        request = self._spec_by_id[outgoing.request_id]
        context, content = context_of(request), self._content_of(request)
        blocks = self._blocks(content, len(context))
        sent = blocks[: len(outgoing.block_ids)]
        for slots, block_id in zip(sent, outgoing.block_ids, strict=True):
            assert self._kv.read([block_id], range(len(slots))) == slots
        if outgoing.first_token is not None:
            assert outgoing.num_tokens == len(context)
            assert len(sent) == len(blocks)
            first_token = next_token(content, request.seed, self._vocab_size, self._specs)
            assert outgoing.first_token.token_id == first_token

    def _check_given(self, outgoing: Outgoing) -> None:
        if not outgoing.block_ids:
            assert not outgoing.is_ended or outgoing.is_withdrawn, "nothing was given"
            return
        assert outgoing.is_ended, "the blocks were given without a final order"
        assert outgoing.first_token is None
        for name, block_id in zip(outgoing.names, outgoing.block_ids, strict=True):
            assert self._kv.blocks[block_id] == self._slots_by_name[name]
        self.num_given += len(outgoing.names)

    def _content_of(self, request: EngineRequest) -> Content:
        adapter = request.adapter.id
        return content_of(seen_context(request), self._specs, self._num_state_blocks, adapter)

    def _blocks(self, content: Content, num_tokens: int) -> list[list[Slot]]:
        """Return the content of all blocks of a hand-off, in order."""
        block_size = self._kv.block_size
        return [
            *(
                content.slots[group][first : first + block_size]
                for first in range(0, num_tokens, block_size)
                for group, request in enumerate(self._specs)
                if first + block_size > request.num_unseen(num_tokens)
            ),
            *([part] * block_size for part in content.state),
        ]


def seen_context(engine_request: EngineRequest) -> list[int]:
    """Return the context with numbers of encodings in place of placeholders."""
    return seen_tokens(context_of(engine_request), engine_request.media)


def context_of(engine_request: EngineRequest) -> tuple[int, ...]:
    """Return the prompt and prior output tokens of a request."""
    return (*engine_request.prompt_token_ids, *engine_request.prior_output_token_ids)
