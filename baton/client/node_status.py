"""Token rates of nodes, from two reports of the router. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.node_info import NodeStatus


@dataclass(frozen=True, slots=True)
class NodeRates:
    prompt_tokens_per_s: float
    sampled_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Status of all nodes at a time of the monotonic clock."""

    at_s: float
    nodes: tuple[NodeStatus, ...]


def rates_between(before: Snapshot | None, after: Snapshot) -> dict[str, NodeRates]:
    """Return rates by address, for nodes whose process is the same in both snapshots."""
    if before is None or after.at_s <= before.at_s:
        return {}
    elapsed_s = after.at_s - before.at_s
    earlier = {(node.address, node.incarnation): node for node in before.nodes if node.incarnation}
    return {
        node.address: NodeRates(
            (node.totals.num_prompt_tokens - previous.totals.num_prompt_tokens) / elapsed_s,
            (node.totals.num_sampled_tokens - previous.totals.num_sampled_tokens) / elapsed_s,
        )
        for node in after.nodes
        if (previous := earlier.get((node.address, node.incarnation))) is not None
    }
