"""Calls that read an adapter on one node or send it names, and their outcomes on several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from grpc import RpcError, StatusCode, aio

from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef
from baton.router.routing.nodes import Node
from baton.rpc.adapters import ADAPTER, ORDER, NameOrder
from baton.rpc.errors import NodeFailed, NotAnOperator
from baton.rpc.security.operators import Operators
from baton.rpc.status import RemoteError, remote_error
from baton.v1 import node_pb2, node_pb2_grpc

READ_TIMEOUT_S = 120.0  # of a file that may be on a network
NAMES_TIMEOUT_S = 10.0
# Codes of refusals that another try would get, too.
REFUSED = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.RESOURCE_EXHAUSTED,
}


class AdapterCalls:
    """Calls of nodes, with the authorization of this router."""

    def __init__(self, channel: Callable[[str], aio.Channel], operators: Operators) -> None:
        self._channel = channel
        self._operators = operators

    async def read(self, node: Node, name: str, path: str) -> AdapterRef | RemoteError:
        """Have a node read the adapter that is to get a name."""
        request = node_pb2.ReadAdapterRequest(name=name, path=path)
        try:
            response = await self._stub(node).ReadAdapter(
                request, timeout=READ_TIMEOUT_S, metadata=self._operators.metadata
            )
        except RpcError as error:
            return remote_error(error)
        return ADAPTER.from_message(response.adapter)

    async def set_names(self, node: Node, orders: Sequence[NameOrder]) -> RemoteError | None:
        request = node_pb2.SetAdapterNamesRequest(names=map(ORDER.to_message, orders))
        try:
            await self._stub(node).SetAdapterNames(
                request, timeout=NAMES_TIMEOUT_S, metadata=self._operators.metadata
            )
        except RpcError as error:
            return remote_error(error)
        return None

    def _stub(self, node: Node) -> node_pb2_grpc.NodeServiceAsyncStub:
        stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(
            self._channel(node.address)
        )
        return stub


def only_adapter(
    name: str, path: str, outcomes: Mapping[Node, AdapterRef | RemoteError]
) -> AdapterRef:
    """Return the adapter that all nodes have read. Raises what names those that have not."""
    raise_failures(outcomes, f"cannot read adapter {name!r}, so no node serves it")
    names_by_adapter: defaultdict[AdapterRef, list[str]] = defaultdict(list)
    for node, outcome in outcomes.items():
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


def raise_failures(outcomes: Mapping[Node, object], failed: str) -> None:
    """Raise the failures of all nodes as one error."""
    failures = {node: each for node, each in outcomes.items() if isinstance(each, RemoteError)}
    if not failures:
        return
    causes = "; ".join(f"{node.card.node_id}: {each.message}" for node, each in failures.items())
    message = f"{len(failures)} of {len(outcomes)} nodes {failed} ({causes})"
    codes = {each.code for each in failures.values()}
    if StatusCode.PERMISSION_DENIED in codes:
        raise NotAnOperator(message)
    if codes <= REFUSED:
        raise InvalidRequest(message)
    raise NodeFailed(f"{message}; try again")
