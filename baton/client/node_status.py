"""Status of the nodes as reported by the router, and their token rates. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.rpc.messages.mapper import Mapper
from baton.v1 import cluster_pb2, node_pb2

ROLES = {node_pb2.NODE_ROLE_PREFILL: "prefill", node_pb2.NODE_ROLE_DECODE: "decode"}
STATE_PREFIX = "NODE_STATE_"


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Use of a tier below a node's KV cache. Counters are since its process started."""

    name: str  # host, file or object
    num_blocks: int
    num_bytes: int
    max_bytes: int
    num_loaded_tokens: int  # of prompts
    num_loaded_blocks: int
    num_stored_blocks: int
    num_evicted_blocks: int
    num_failed_blocks: int


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Status of one node. An unreachable node has only address, role and state."""

    role: str  # prefill or decode
    address: str
    state: str  # ready, draining, not ready, unlisted, replaced or unreachable
    node_id: str = ""
    incarnation: str = ""
    model: str = ""
    version: str = ""
    kv_transport: str = ""
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_sent: int = 0  # by this router, not ended yet
    num_prompt_tokens: int = 0  # counters since its process started, also the following ones
    num_hit_tokens: int = 0
    num_sampled_tokens: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    tiers: tuple[TierUsage, ...] = ()

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens found in the prefix cache; None before the first prompt."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of speculated tokens that were accepted; None before the first one."""
        if not self.num_proposed_tokens:
            return None
        return self.num_accepted_tokens / self.num_proposed_tokens

    def tier_hit_rate(self, tier: TierUsage) -> float | None:
        """Share of prompt tokens that were loaded from the tier; None before the first prompt."""
        return tier.num_loaded_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None


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
            (node.num_prompt_tokens - previous.num_prompt_tokens) / elapsed_s,
            (node.num_sampled_tokens - previous.num_sampled_tokens) / elapsed_s,
        )
        for node in after.nodes
        if (previous := earlier.get((node.address, node.incarnation))) is not None
    }


def statuses_from(reports: Iterable[cluster_pb2.NodeReport]) -> tuple[NodeStatus, ...]:
    return tuple(_status_from(report) for report in reports)


REPORT_FIELDS = frozenset(cluster_pb2.NodeReport.DESCRIPTOR.fields_by_name) - {"totals"}
TOTALS_FIELDS = frozenset(node_pb2.NodeTotals.DESCRIPTOR.fields_by_name)
REPORT = Mapper(
    NodeStatus, cluster_pb2.NodeReport, unmapped=TOTALS_FIELDS | {"role", "state", "totals"}
)
TOTALS = Mapper(NodeStatus, node_pb2.NodeTotals, unmapped=REPORT_FIELDS)


def _status_from(report: cluster_pb2.NodeReport) -> NodeStatus:
    state = cluster_pb2.NodeState.Name(report.state).removeprefix(STATE_PREFIX)
    return REPORT.from_message(
        report,
        role=ROLES.get(report.role, "?"),
        state=state.lower().replace("_", " "),
        **TOTALS.fields_of(report.totals),
    )
