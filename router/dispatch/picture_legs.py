"""Pictures of a request on their way to the node that computes its prompt: pixels, or encodings.

An encoding is the KV of a prompt of its own (`core.media.StoredPicture`): an encode node computes
it in an encode leg, and the node that needs it pulls its blocks. A node that has one already is
not asked again. Without encode nodes, the node gets pixels. A picture needs neither if the node has
reported the KV of its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from baton.core.ids import HandoffId, ModelVariant, Peer
from baton.core.kv_hints import KvHints
from baton.core.legs import LegKind
from baton.core.media import Picture, StoredPicture, encoding_rows, picture_salt
from baton.core.request import ENCODE, PREFETCH, UNSAMPLED, EngineRequest, PrefixSource
from baton.router.dispatch.attempt import Attempt, DispatchedRequest
from baton.router.dispatch.node_rpcs import LegEvent, LegOutput, NodeCalls
from baton.router.request_scope import RequestContext
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Leg, Route
from baton.router.routing.routing_view import RoutingRequest, build_view, find_holders
from baton.router.routing.served_models import Node
from baton.rpc.errors import NodeFailed
from baton.rpc.messages.calls import CallReport, node_request_id


class PictureLegs:
    def __init__(self, table: NodeTable, node_calls: NodeCalls, clock: Callable[[], float]) -> None:
        self._table = table
        self._node_calls = node_calls
        self._clock = clock

    async def bring(self, request: DispatchedRequest, route: Route, attempt: Attempt) -> None:
        """Have all encodings in the KV cache of the node that computes the prompt.

        Raises NodeFailed, and notes with the attempt which node has failed.
        """
        encoder, rows = route.encoder, route.first.node.card.stored_rows
        if encoder is None or rows is None:
            return
        prompt = request.call.token_prompt
        pictures = {each.digest: each for each in prompt.pictures}
        num_rows = encoding_rows(prompt.media)
        legs = [
            _PictureLeg(rows.prompt(digest, num_rows[digest]), pictures[digest], encoder, index)
            for index, digest in enumerate(self._needed(request, route.first.node, attempt.number))
        ]
        tasks = [asyncio.ensure_future(self._bring(leg, request, route, attempt)) for leg in legs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def pixels_for(
        self, request: DispatchedRequest, route: Route, number: int
    ) -> tuple[Picture, ...]:
        """Return the pictures that the node of the prompt gets as pixels in this attempt."""
        prompt, card = request.call.token_prompt, route.first.node.card
        if route.encoder is not None or not card.encodes_pictures:
            return ()
        rows = card.stored_rows
        if rows is None:
            return prompt.pictures
        needed = self._needed(request, route.first.node, number)
        pixels = tuple(each for each in prompt.pictures if each.digest in needed)
        if pixels:
            return pixels
        # A node wants room for the encodings of a prompt without pixels, as if they were stored.
        num_blocks = sum(map(rows.num_blocks, encoding_rows(prompt.media).values()))
        num_tokens = len(prompt.token_ids) + num_blocks * rows.block_size
        return () if num_tokens <= card.max_sequence_length else prompt.pictures

    async def _bring(
        self, leg: _PictureLeg, request: DispatchedRequest, route: Route, attempt: Attempt
    ) -> None:
        node, number = route.first.node, attempt.number
        # After a failure, what nodes have reported may be wrong.
        holder = self._find_holder(leg, request, node) if number == 1 else None
        if holder is node:
            return
        if holder is not None and await self._fetch(leg, request, route, attempt, holder):
            return
        with self._counted(leg.encoder), _blamed(attempt, leg.encoder):
            await self._encode(leg, request, number)
        if not await self._fetch(leg, request, route, attempt, leg.encoder):
            failure = NodeFailed(
                f"the encoding of a picture did not get from encode node {leg.encoder.address} to "
                f"{node.address}"
            )
            attempt.failure_by_address[leg.encoder.address] = failure
            raise failure

    def _needed(self, request: DispatchedRequest, node: Node, number: int) -> Mapping[bytes, None]:
        """Return the digests of pictures with tokens whose KV the node may not have, in order.

        After a failure, what nodes have reported may be wrong.
        """
        num_cached = self._num_cached(request, node) if number == 1 else 0
        return dict.fromkeys(
            each.digest
            for each in request.call.token_prompt.media
            if each.start + each.num_tokens > num_cached
        )

    def _num_cached(self, request: DispatchedRequest, node: Node) -> int:
        """Return the tokens of the prompt whose KV the node has reported, and will use."""
        call = request.call
        if call.task.is_pooling or call.sampling.prompt_logprobs is not None:
            return 0  # it computes all tokens
        wanted = RoutingRequest(
            call.prompt_token_ids,
            model=call.model,
            media=call.token_prompt.media,
            cache_salt=request.cache_salt(1),
        )
        return build_view(self._table, wanted).reported.get(node.address, 0)

    def _find_holder(self, leg: _PictureLeg, request: DispatchedRequest, node: Node) -> Node | None:
        """Return a node that has reported all blocks of the encoding: `node` itself if it has."""
        stored = leg.stored
        wanted = RoutingRequest(
            stored.token_ids,
            model=ModelVariant(request.call.model.base),
            media=stored.media,
            cache_salt=picture_salt(request.cache_salt(1)),
        )
        view = build_view(self._table, wanted)
        if view.reported.get(node.address, 0) >= stored.num_cached_tokens:
            return node
        holders = find_holders(view, request.failures.addresses)
        holder = holders.get(self._table.kind_number(node.address))
        has_all = holder is not None and holder.num_tokens >= stored.num_cached_tokens
        return holder.node if holder is not None and has_all else None

    async def _encode(self, leg: _PictureLeg, request: DispatchedRequest, number: int) -> None:
        order = replace(
            self._order(leg, request, f"encode{leg.index}", number),
            task=ENCODE,
            pictures=(leg.picture,),
        )
        await self._call(Leg(LegKind.ENCODE, leg.encoder), order, request.context)

    async def _fetch(
        self,
        leg: _PictureLeg,
        request: DispatchedRequest,
        route: Route,
        attempt: Attempt,
        holder: Node,
    ) -> bool:
        """Have the node pull the encoding from `holder`. Returns whether it has all of it then."""
        node, num_tokens = route.first.node, leg.stored.num_cached_tokens
        peer = Peer(holder.card.node_id, holder.address)
        name = f"fetch{leg.index}.{holder.card.node_id}"
        order = replace(
            self._order(leg, request, name, attempt.number),
            task=PREFETCH,
            kv_hints=KvHints(prefetch=True),
            prefix_source=PrefixSource(peer, num_tokens),
        )
        with _blamed(attempt, node):
            report = await self._call(Leg(route.first.kind, node), order, request.context)
        return report.prompt_tokens_cached >= num_tokens

    def _order(
        self, leg: _PictureLeg, request: DispatchedRequest, name: str, number: int
    ) -> EngineRequest:
        call, context = request.call, request.context
        return EngineRequest(
            request_id=node_request_id(HandoffId(f"{request.own_id}.{name}", number)),
            prompt_token_ids=leg.stored.token_ids,
            sampling=UNSAMPLED,
            seed=0,
            age_s=max(0.0, self._clock() - context.received_s),
            priority=call.priority,
            media=leg.stored.media,
            cache_salt=picture_salt(request.cache_salt(number)),
            tenant=call.tenant or call.cache_salt,
            client=call.client,
        )

    async def _call(self, leg: Leg, order: EngineRequest, context: RequestContext) -> CallReport:
        """Call a node, and return its last report."""
        reports = [CallReport()]

        def deliver(event: LegEvent) -> None:
            if isinstance(event, LegOutput) and event.report is not None:
                reports.append(event.report)

        timeout_s = context.remaining_s(self._clock())
        await self._node_calls.call(leg, order, deliver, timeout_s=timeout_s, trace=context.trace)
        return reports[-1]

    @contextmanager
    def _counted(self, node: Node) -> Iterator[None]:
        """Count a request of the node until the end of the block."""
        load = self._table.node_load(node)
        load.note_sent("")
        try:
            yield
        finally:
            load.note_request_ended("")


@dataclass(frozen=True, slots=True)
class _PictureLeg:
    stored: StoredPicture
    picture: Picture
    encoder: Node
    index: int  # among the pictures of the request


@contextmanager
def _blamed(attempt: Attempt, node: Node) -> Iterator[None]:
    """Note a failure of the block as one of the node."""
    try:
        yield
    except NodeFailed as failure:
        attempt.failure_by_address[node.address] = failure
        raise
