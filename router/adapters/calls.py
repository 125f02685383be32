"""Calls that load and unload an adapter on one node, and their outcomes on several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from grpc import RpcError, StatusCode, aio

from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef
from baton.router.routing.nodes import Node
from baton.rpc.errors import NodeFailed, NotAnOperator
from baton.rpc.node_info import ADAPTER, NameOrder
from baton.rpc.security.operators import Operators
from baton.rpc.status import RemoteError, remote_error
from baton.v1 import node_pb2, node_pb2_grpc

LOAD_TIMEOUT_S = 120.0  # of a file that may be on a network
UNLOAD_TIMEOUT_S = 10.0
# Codes of refusals that another try would get, too.
REFUSED = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.ALREADY_EXISTS,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.RESOURCE_EXHAUSTED,
}

Outcome = AdapterRef | RemoteError | None  # None: the node did not know the name


class AdapterCalls:
    """Calls of nodes, with the authorization of this router."""

    def __init__(self, channel: Callable[[str], aio.Channel], operators: Operators) -> None:
        self._channel = channel
        self._operators = operators

    async def send(
        self,
        node: Node,
        order: NameOrder,
        *,
        can_replace: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> Outcome:
        """Have a node load the adapter of a folder, with an id only that one, or unload a name."""
        try:
            if order.adapter is not None:
                return await self._load(node, order, order.adapter, can_replace, timeout_s)
            await self._stub(node).UnloadAdapter(
                node_pb2.UnloadAdapterRequest(name=order.name, generation=order.generation),
                timeout=UNLOAD_TIMEOUT_S,
                metadata=self._operators.metadata,
            )
        except RpcError as error:
            remote = remote_error(error)
            is_unknown = order.adapter is None and remote.code is StatusCode.NOT_FOUND
            return None if is_unknown else remote
        return AdapterRef(order.name)

    async def _load(
        self, node: Node, order: NameOrder, adapter: AdapterRef, can_replace: bool, timeout_s: float
    ) -> AdapterRef:
        request = node_pb2.LoadAdapterRequest(
            name=order.name,
            path=adapter.path,
            can_replace=can_replace,
            id=adapter.id,
            generation=order.generation,
        )
        response = await self._stub(node).LoadAdapter(
            request, timeout=timeout_s, metadata=self._operators.metadata
        )
        return ADAPTER.from_message(response.adapter)

    def _stub(self, node: Node) -> node_pb2_grpc.NodeServiceAsyncStub:
        stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(
            self._channel(node.address)
        )
        return stub


def only_adapter(
    name: str, path: str, nodes: Sequence[Node], outcomes: Sequence[Outcome]
) -> AdapterRef:
    """Return the adapter that all nodes have loaded. Raises what names those that have not."""
    raise_failures(nodes, outcomes, f"did not load adapter {name!r}, so no node serves it")
    names_by_adapter: defaultdict[AdapterRef, list[str]] = defaultdict(list)
    for node, outcome in zip(nodes, outcomes, strict=True):
        if isinstance(outcome, AdapterRef):
            names_by_adapter[outcome].append(node.card.node_id)
    if len(names_by_adapter) > 1:
        found = "; ".join(
            f"{adapter.id[:12]} on {', '.join(names)}"
            for adapter, names in names_by_adapter.items()
        )
        raise InvalidRequest(
            f"nodes read unlike adapters from {path!r} ({found}), so no node serves it: copy "
            "the same folder below the --lora-root of each node"
        )
    return next(iter(names_by_adapter))


def raise_failures(nodes: Sequence[Node], outcomes: Sequence[Outcome], failed: str) -> None:
    """Raise the failures of all nodes as one error."""
    failures = [
        (node, outcome)
        for node, outcome in zip(nodes, outcomes, strict=True)
        if isinstance(outcome, RemoteError)
    ]
    if not failures:
        return
    causes = "; ".join(f"{node.card.node_id}: {remote.message}" for node, remote in failures)
    message = f"{len(failures)} of {len(nodes)} nodes {failed} ({causes})"
    codes = {remote.code for _, remote in failures}
    if StatusCode.PERMISSION_DENIED in codes:
        raise NotAnOperator(message)
    if codes <= REFUSED:
        raise InvalidRequest(message)
    raise NodeFailed(f"{message}; try again")
