"""Finds the nodes of an attempt, and waits for nodes while none can be used."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from baton.core.legs import LegKind
from baton.router.dispatch.quarantine import Quarantine, Suspicion
from baton.router.dispatch.retries import CircuitBreakers, DispatchConfig
from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route, choose, decoded_on
from baton.router.routing.routing_view import RoutingRequest
from baton.router.routing.served_models import Node
from baton.rpc.errors import IncompatibleNodes, NoNodes, PoisonedRequest


class RouteFinder:
    """Applies the routing policy to the nodes that failures, breakers and quarantine leave."""

    def __init__(
        self,
        table: NodeTable,
        config: DispatchConfig,
        breakers: CircuitBreakers,
        quarantine: Quarantine,
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self._config = config
        self._breakers = breakers
        self._quarantine = quarantine
        self._clock = clock
        # By model: those of one must not decide whose turn it is at another's nodes.
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Let waiting requests look again: the nodes or the quarantine have changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def find(
        self,
        request: RoutingRequest,
        failed: frozenset[str],
        suspicion: Suspicion,
        prompt_node: Node | None = None,
    ) -> Route:
        """Choose the nodes of an attempt, avoiding the addresses in `failed` where possible.

        `prompt_node` is the decode node that has the prompt's KV for another answer. It is used if
        it has room. Raises NoNodes, IncompatibleNodes and PoisonedRequest.
        """
        route = None if prompt_node is None else self._route_to(prompt_node, request)
        if route is not None and self._is_allowed(route, suspicion):
            return route
        # Names that are not served are the clients' own, and have no numbers of theirs.
        name = request.model.base if request.model.base in self._table.models else ""
        request = replace(request, number=next(self._numbers[name]))
        return await self._find_open(request, failed, suspicion)

    def _route_to(self, decode: Node, request: RoutingRequest) -> Route | None:
        """Return the route to a node that can continue the prompt from its cache, if it has room.

        With recurrent layers it cannot: the state at the end of a prompt is not cached.
        """
        naming = decode.card.prefix_naming
        if naming is None or naming.needs_snapshot:
            return None
        if decode not in self._table.open_nodes(LegKind.DECODE):
            return None
        capacity = decode.card.max_num_seqs
        if capacity and self._table.node_load(decode).num_requests >= capacity:
            return None
        block_size = decode.card.fingerprint.layout.block_size
        num_missing = 1 + (len(request.prompt_token_ids) - 1) % block_size
        first_missing = len(request.prompt_token_ids) - num_missing
        if not decode.card.encodes_pictures and any(
            each.overlaps(first_missing, len(request.prompt_token_ids)) for each in request.media
        ):
            return None
        return Route(decoded_on(decode), "its prompt is there, for another answer", num_missing)

    def _is_allowed(self, route: Route, suspicion: Suspicion) -> bool:
        closed = self._quarantine.closed_addresses(suspicion)
        return route.last.node.address not in closed and not suspicion.is_suspect

    async def _find_open(
        self, request: RoutingRequest, failed: frozenset[str], suspicion: Suspicion
    ) -> Route:
        """Choose nodes that the quarantine does not close to this request.

        Waits up to `quarantine_patience_s` for such nodes, then takes any.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.quarantine_patience_s
        while True:
            route = await self._choose(request, failed)
            if suspicion.group.is_poisoned:
                raise PoisonedRequest("nodes fail when they run another answer to the same prompt")
            closed = self._quarantine.closed_addresses(suspicion)
            is_held = self._quarantine.is_group_tested(suspicion) or self._is_group_lost(suspicion)
            if loop.time() >= give_up_s or not (is_held or closed & set(route.addresses)):
                return _without_holder_in(closed, route)
            detour = None if is_held else self._route_around(request, route, failed, closed)
            if detour is not None:
                return _without_holder_in(closed, detour)
            changed = self._changed
            with self._quarantine.waiting(suspicion, route), suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await changed.wait()

    def _is_group_lost(self, suspicion: Suspicion) -> bool:
        """Return whether another answer to its prompt is on a lost node and not judged yet."""
        addresses = self._quarantine.group_addresses(suspicion)
        return bool(addresses) and not addresses <= {node.address for node in self._table.nodes}

    def _route_around(
        self, request: RoutingRequest, route: Route, failed: frozenset[str], closed: frozenset[str]
    ) -> Route | None:
        """Return a route around `closed` that is split if and only if `route` is."""
        for without in (closed | failed, closed):
            with suppress(NoNodes, IncompatibleNodes):
                detour = choose(self._table, self._config.routing, request, without)
                if detour.is_split == route.is_split:
                    return detour
        return None

    async def _choose(self, request: RoutingRequest, failed: frozenset[str]) -> Route:
        """Choose nodes, avoiding those that failed where possible.

        Raises NoNodes and IncompatibleNodes if there are none for `node_patience_s`.
        """
        avoided = failed | self._breakers.avoided_addresses(self._clock())
        for without in dict.fromkeys(filter(None, (avoided, failed))):
            with suppress(NoNodes, IncompatibleNodes):
                return choose(self._table, self._config.routing, request, without, avoided)
        if failed:
            # A node that failed is better than none. Pause so that a lost one can leave the table.
            await asyncio.sleep(self._config.retry_pause_s)
        return await self._wait_for_any(request, avoided)

    async def _wait_for_any(self, request: RoutingRequest, avoided: frozenset[str]) -> Route:
        """Choose again at each change of the table, such as for a node that restarts."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._config.node_patience_s
        while True:
            changed = self._changed
            try:
                return choose(self._table, self._config.routing, request, unfit_holders=avoided)
            except (NoNodes, IncompatibleNodes):
                if loop.time() >= give_up_s:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_s):
                    await changed.wait()


def _without_holder_in(closed: frozenset[str], route: Route) -> Route:
    """Return the route without the node to pull from if that one is in quarantine."""
    is_closed = route.holder is not None and route.holder.node.address in closed
    return replace(route, holder=None) if is_closed else route
