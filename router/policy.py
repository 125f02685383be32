"""Which nodes serve a request: pure functions of what is known of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.nodes import Node, NodeTable
from serving.errors import NoNodes
from serving.node import NodeRole


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy may know of a request."""

    prompt_token_ids: tuple[int, ...]
    model: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """The nodes that serve one try. Without a prefill node, decode computes the prompt too."""

    decode: Node
    prefill: Node | None
    local_reason: str = ""  # why there is no prefill node


class Policy(Protocol):
    """Orders the candidates of one role; the first one that fits is taken."""

    def rank(self, ask: Ask, nodes: Sequence[Node]) -> list[Node]: ...


class RoundRobin:
    """Each node of a role in its turn."""

    def __init__(self) -> None:
        self._turn_by_role: dict[NodeRole, int] = {}

    def rank(self, ask: Ask, nodes: Sequence[Node]) -> list[Node]:
        if not nodes:
            return []
        role = nodes[0].card.role
        turn = self._turn_by_role.get(role, 0)
        self._turn_by_role[role] = turn + 1
        start = turn % len(nodes)
        return [*nodes[start:], *nodes[:start]]


POLICIES: dict[str, type[Policy]] = {"round_robin": RoundRobin}


def choose(
    table: NodeTable, policy: Policy, ask: Ask, without: frozenset[str] = frozenset()
) -> Route:
    """Raises NoNodes. `without` names the addresses that just failed this request."""
    decodes = [
        node for node in table.open_nodes(NodeRole.DECODE, without) if _serves(node, ask.model)
    ]
    if not decodes:
        raise NoNodes("no decode node is reachable and open; start one, or try again later")
    decode = policy.rank(ask, decodes)[0]
    prefills = table.open_nodes(NodeRole.PREFILL, without)
    if not prefills:
        return Route(decode, None, "no prefill node is reachable and open")
    fitting = [node for node in prefills if node.may_share_kv_with(decode)]
    if not fitting:
        return Route(decode, None, "no prefill node's KV fits the decode node's")
    return Route(decode, policy.rank(ask, fitting)[0])


def _serves(node: Node, model: str) -> bool:
    return model in ("", node.card.model)
